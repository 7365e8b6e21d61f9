#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use super::*;
use pollster::block_on;

/// A tokenizer of single letters: `a` is 1 … `z` is 26, space 27, `$` 28; the end token is 0.
fn letters() -> Arc<Tokenizer> {
    let mut vocab: Vec<String> = vec!["\"<end>\":0".into()];
    vocab.extend(('a'..='z').chain([' ', '$']).zip(1..).map(|(c, i)| format!("\"{c}\":{i}")));
    let json = format!(
        "{{\"version\":\"1.0\",\"added_tokens\":[{{\"id\":0,\"content\":\"<end>\",\"single_word\":false,\"lstrip\":false,\
         \"rstrip\":false,\"normalized\":false,\"special\":true}}],\"decoder\":{{\"type\":\"Fuse\"}},\
         \"model\":{{\"type\":\"BPE\",\"vocab\":{{{}}},\"merges\":[]}}}}",
        vocab.join(",")
    );
    Arc::new(Tokenizer::parse("letters", json.as_bytes(), None).unwrap())
}

fn encoder(mask_prompt: bool, max_tokens: u64, template: Option<&str>) -> Arc<Encoder> {
    let template = template.map(|t| ChatTemplate::parse("t", t, "", "").unwrap());
    let options = DataOptions { mask_prompt, max_tokens };
    Arc::new(Encoder::new(letters(), template, 0, 29, options).unwrap())
}

fn scan(text: &str, encoder: Arc<Encoder>) -> Result<Dataset> {
    block_on(Dataset::scan(Source::memory("d.jsonl", text.as_bytes().to_vec()), encoder))
}

fn rows(lengths: impl IntoIterator<Item = usize>) -> String {
    lengths.into_iter().map(|n| format!("{{\"text\":\"{}\"}}\n", "a".repeat(n))).collect()
}

#[test]
fn a_text_ends_once_and_a_row_that_is_too_long_is_cut_and_counted() {
    let text = "\u{feff}{\"text\":\"ab\"}\r\n\n{\"text\":\"ab<end>\", \"source\": 1}\n  {\"text\":\"abcdef\"}";
    let set = scan(text, encoder(false, 4, None)).unwrap();
    let ids: Vec<Vec<i32>> = (0..3).map(|i| block_on(set.example(i)).unwrap().ids).collect();
    assert_eq!(ids, [vec![1, 2, 0], vec![1, 2, 0], vec![1, 2, 3, 4]]);
    let stats = set.stats();
    assert_eq!((stats.rows, stats.tokens, stats.longest, stats.trained), (3, 10, 4, 7));
    assert_eq!((stats.cut_rows, stats.cut_tokens), (1, 3));
    assert!(stats.notes(4)[0].contains("1 of 3 rows are longer than 4 tokens"), "{:?}", stats.notes(4));
    assert_eq!(block_on(set.example(3)).unwrap_err().code(), "not-found");
}

#[test]
fn the_mask_changes_what_is_trained_and_never_the_ids() {
    let text = "{\"prompt\":\"abc\",\"completion\":\" d\"}";
    let all = block_on(scan(text, encoder(false, 9, None)).unwrap().example(0)).unwrap();
    let masked = block_on(scan(text, encoder(true, 9, None)).unwrap().example(0)).unwrap();
    assert_eq!((&all.ids, all.from, masked.from), (&masked.ids, 1, 3));
    assert_eq!(masked.ids, [1, 2, 3, 27, 4, 0]);

    let chat = "{% for m in messages %}{{ m.role[0] + m.content + '$' }}{% endfor %}{% if add_generation_prompt %}a{% endif %}";
    let text = "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"},{\"role\":\"assistant\",\"content\":\"yz\"}]}";
    let masked = block_on(scan(text, encoder(true, 9, Some(chat))).unwrap().example(0)).unwrap();
    // "ux$" and the beginning of the answer, "a", are the prompt; the template ends messages itself.
    assert_eq!((masked.ids.as_slice(), masked.from), ([21, 24, 28, 1, 25, 26, 28].as_slice(), 4));
    let unmasked = block_on(scan(text, encoder(false, 9, Some(chat))).unwrap().example(0)).unwrap();
    assert_eq!((unmasked.ids, unmasked.from), (masked.ids, 1));
}

#[test]
fn rows_without_a_token_to_train_are_left_out_and_said() {
    let text = "{\"prompt\":\"abcdef\",\"completion\":\"g\"}\n{\"prompt\":\"a\",\"completion\":\"g\"}\n";
    let set = scan(text, encoder(true, 4, None)).unwrap();
    assert_eq!((set.len(), set.stats().untrained_rows), (1, 1));
    assert!(set.stats().notes(4).iter().any(|n| n.contains("1 of 2 rows have no token")), "{:?}", set.stats());
    let none = scan("{\"text\":\"\"}", encoder(false, 4, None)).unwrap_err();
    assert!(none.to_string().contains("none of its rows"), "{none}");
}

#[test]
fn a_bad_line_is_named_by_file_and_line() {
    let good = "{\"text\":\"a\"}\n\n";
    let deep = format!("{{\"text\":{}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
    for bad in [
        "{\"text\":1}",
        "{\"text\":\"a\",\"text\":\"b\"}",
        "{\"text\":\"a\"",
        "{}",
        "[]",
        "[\"a\",null,null,null]",
        "{\"prompt\":\"a\"}",
        "{\"text\":\"a\",\"prompt\":\"a\",\"completion\":\"b\"}",
        "{\"messages\":[]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}",
        "\u{1}",
        deep.as_str(),
    ] {
        let error = scan(&format!("{good}{bad}\n{good}"), encoder(false, 9, None)).unwrap_err();
        let text = error.to_string();
        assert!(error.code() == "format" && text.starts_with("d.jsonl:3: ") && text.len() < 1200, "{text}");
    }
    let masked = scan("{\"text\":\"a\"}", encoder(true, 9, None)).unwrap_err().to_string();
    assert!(masked.starts_with("d.jsonl:1: `text` has no prompt"), "{masked}");
    let refusing = "{{ raise_exception('no') }}";
    let chat = "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}";
    let error = scan(chat, encoder(false, 9, Some(refusing))).unwrap_err().to_string();
    assert!(error.starts_with("d.jsonl:1: ") && error.contains("no"), "{error}");
    assert_eq!(scan("\n \n", encoder(false, 9, None)).unwrap_err().code(), "format");
    assert_eq!(scan("", encoder(false, 9, None)).unwrap_err().code(), "format");
}

#[test]
fn lines_of_any_length_are_found_whatever_the_pieces_they_are_read_in() {
    let text = rows([3, CHUNK, 1, 2 * CHUNK + 5, 7]);
    let set = scan(&text, encoder(false, 1 << 20, None)).unwrap();
    let found: Vec<usize> = (0..5).map(|i| block_on(set.example(i)).unwrap().ids.len()).collect();
    assert_eq!(found, [4, CHUNK + 1, 2, 2 * CHUNK + 6, 8]);
    let endless = format!("{{\"text\":\"{}\"}}", "a".repeat(MAX_LINE_BYTES));
    let error = scan(&endless, encoder(false, 8, None)).unwrap_err().to_string();
    assert!(error.starts_with("d.jsonl:1: the line has more than"), "{error}");
}

#[test]
fn a_token_that_the_model_does_not_have_is_refused_at_the_scan() {
    let options = DataOptions { mask_prompt: false, max_tokens: 9 };
    let small = Arc::new(Encoder::new(letters(), None, 0, 3, options).unwrap());
    let error = scan("{\"text\":\"ab\"}\n{\"text\":\"c\"}", small).unwrap_err().to_string();
    assert!(error.starts_with("d.jsonl:2: token 3"), "{error}");
    assert_eq!(Encoder::new(letters(), None, 29, 29, options).unwrap_err().code(), "invalid");
    let short = DataOptions { max_tokens: 1, ..options };
    assert_eq!(Encoder::new(letters(), None, 0, 29, short).unwrap_err().code(), "invalid");
}

#[test]
fn a_file_that_changed_since_the_scan_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("train.jsonl");
    std::fs::write(&path, rows([3, 4])).unwrap();
    let files = DataFiles::open(folder.path()).unwrap();
    assert!(files.valid.is_none());
    let set = block_on(Dataset::scan(files.train, encoder(false, 9, None))).unwrap();
    let before = set.fingerprint();
    std::fs::write(&path, rows([3, 4, 5])).unwrap();
    assert_eq!(block_on(set.example(0)).unwrap_err().code(), "source-changed");
    let again = DataFiles::open(&path).unwrap();
    let set = block_on(Dataset::scan(again.train, encoder(false, 9, None))).unwrap();
    assert_ne!(set.fingerprint(), before);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(DataFiles::open(folder.path()).unwrap_err().code(), "not-found");
}

fn batches(lengths: Vec<usize>, order: Order, rows_of_a_batch: u64, accumulation: u64) -> Batches {
    let set = scan(&rows(lengths), encoder(false, 200, None)).unwrap();
    Batches::new(set, order, rows_of_a_batch, accumulation).unwrap()
}

#[test]
fn file_order_goes_round_and_a_window_has_one_length() {
    let mut b = batches(vec![3, 40, 5, 6, 100], Order::File, 2, 1);
    assert_eq!(b.window_rows(0), [0, 1]);
    assert_eq!(b.window_rows(2), [4, 0]);
    assert_eq!(b.window_rows(u64::MAX), b.window_rows(u64::MAX % 5));
    let tokens: Vec<u64> = b.buckets().iter().map(|bucket| bucket.tokens).collect();
    assert_eq!(tokens, [32, 64, 128]);
    let window = block_on(b.window(0)).unwrap();
    assert_eq!((window.len(), window[0].bucket.rows, window[0].bucket.tokens), (1, 2, 64));
    assert_eq!(window[0].rows, [0, 1]);
    assert_eq!(window[0].ids[..5], [1, 1, 1, 0, 0]);
    assert_eq!(window[0].labels[..5], [1, 1, 0, -1, -1]);
    assert_eq!(window[0].trained(), 3 + 40);
}

#[test]
fn shuffled_passes_are_all_rows_once_in_windows_of_like_length_and_go_on_from_any_position() {
    let lengths: Vec<usize> = (0..103).map(|i| 1 + (i * 37) % 150).collect();
    let mut b = batches(lengths, Order::Shuffled { seed: 7 }, 2, 2);
    let windows = b.windows_per_pass();
    assert_eq!(windows, 25);
    let known = b.buckets();
    let mut padded = 0;
    for pass in 0..3 {
        let mut seen = Vec::new();
        for position in pass * windows..(pass + 1) * windows {
            let rows = b.window_rows(position);
            let window = block_on(b.window(position)).unwrap();
            assert_eq!((rows.len(), window.len()), (4, 2));
            assert!(window.iter().all(|m| m.bucket == window[0].bucket && known.contains(&m.bucket)));
            padded += window[0].bucket.tokens;
            seen.extend(rows);
        }
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 100, "no row twice, the three that are left wait");
    }
    // Without sorting by length nearly all windows would be of the longest bucket.
    assert!(padded < 3 * windows * 110, "{padded}");
    let mut fresh = Batches::new(b.set().clone(), Order::Shuffled { seed: 7 }, 2, 2).unwrap();
    for position in [60, 3, 26] {
        assert_eq!(fresh.window_rows(position), b.window_rows(position));
    }
    assert_ne!(b.window_rows(0), b.window_rows(windows));
}

#[test]
fn fewer_rows_than_a_window_are_used_again() {
    let mut b = batches(vec![3, 4, 5], Order::Shuffled { seed: 1 }, 4, 2);
    let rows = b.window_rows(9);
    assert_eq!(rows.len(), 8);
    assert!((0..3).all(|row| rows.iter().filter(|r| **r == row).count() >= 2));
    assert_eq!(Batches::new(b.set().clone(), Order::File, 0, 1).unwrap_err().code(), "invalid");
    assert_eq!(Batches::new(b.set().clone(), Order::File, u64::MAX, 2).unwrap_err().code(), "invalid");
}

#[test]
fn an_evaluation_has_every_row_once_and_fills_up_with_what_does_not_count() {
    let b = batches(vec![3, 4, 40], Order::File, 2, 1);
    assert_eq!(b.evaluation_batches(), 2);
    let all: Vec<_> = (0..2).map(|i| block_on(b.evaluation(i)).unwrap()).collect();
    assert_eq!(all[0].rows, [0, 1]);
    assert_eq!(all[1].rows, [2, -1]);
    assert_eq!(all.iter().map(|m| m.trained()).sum::<u64>(), b.set().stats().trained);
    assert!(all.iter().all(|m| b.buckets().contains(&m.bucket)));
}
