// Elements by id, and elements with text. Text of files, errors and generation reaches the page through here only: as
// text, never as markup.

/**
 * @template {HTMLElement} T
 * @param {string} id
 * @param {new () => T} kind
 * @returns {T}
 */
export function byId(id, kind) {
  const found = document.getElementById(id);
  if (!(found instanceof kind)) throw new Error(`index.html has no ${kind.name} of the id ${id}`);
  return found;
}

/**
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} name
 * @param {string | { text?: string, class?: string, title?: string }} [what] its text, or more of it
 * @param {...Node} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function element(name, what = {}, ...children) {
  const made = document.createElement(name);
  const { text, title, class: classes } = typeof what === "string" ? { text: what, title: undefined, class: undefined } : what;
  if (text !== undefined) made.textContent = text;
  if (title !== undefined) made.title = title;
  if (classes !== undefined) made.className = classes;
  made.append(...children);
  return made;
}

/**
 * Rows of names and values in a `dl`.
 * @param {HTMLElement} list
 * @param {Iterable<readonly [string, string, string?]>} rows name, value, title
 */
export function fillList(list, rows) {
  list.replaceChildren(
    ...[...rows].flatMap(([name, value, title]) => [element("dt", name), element("dd", title ? { text: value, title } : value)]),
  );
}

/**
 * A kept thing as an item of a list: its name, what it is, and what can be done with it.
 * @param {string} kind of thing, for those who hear the buttons without the list
 * @param {string} name
 * @param {string} what
 * @param {[string, () => void][]} actions
 */
export function keptItem(kind, name, what, actions) {
  const buttons = actions.map(([verb, act]) => {
    const button = element("button", verb);
    button.type = "button";
    button.ariaLabel = `${verb} the ${kind} ${name}`;
    button.onclick = act;
    return button;
  });
  return element("li", "", element("span", name, element("small", what)), ...buttons);
}

/** Whether the visitor asked for less motion. */
export const stillness = matchMedia("(prefers-reduced-motion: reduce)");
/** Whether the visitor's system is dark. */
export const darkness = matchMedia("(prefers-color-scheme: dark)");

/**
 * Runs something at the next frame, however often it is asked for before.
 * @param {() => void} draw
 */
export function eachFrame(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw();
    });
  };
}
