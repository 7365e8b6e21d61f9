//! A training step as a program: gradients into one array, the norm, the finite test, AdamW as the step's last actions.
//!
//! All trainable tensors lie behind one another in a few state arrays, cut between tensors every 128 MiB, so that an
//! optimizer step is one dispatch a cut instead of one a tensor, and so that a gradient is written where it stays.

use super::optimizer::{self, AdamW, Arrays, HYPER, HYPER_INPUT};
use crate::caps::MAX_WEIGHT_BUFFER;
use crate::compile::Category;
use crate::error::{Error, Result};
use crate::graph::{Graph, Program, Shape, Sinks, Tensor};

/// Name of the output that holds the control words: bits of what was not finite (0: the update was made), factor of
/// clipping (f32), global norm (f32).
pub const CONTROL: &str = "control";

/// A trainable tensor and where it lies.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    /// Its name, unique.
    pub name: String,
    /// Its shape.
    pub shape: Shape,
    /// Which array.
    pub array: usize,
    /// Its first element there.
    pub offset: u64,
}

/// The trainable tensors of a run, in the order in which they were added. All programs of a session use the same.
#[derive(Clone, Debug, Default)]
pub struct Params {
    params: Vec<Param>,
    arrays: Vec<u64>,
    largest: Option<u64>,
}

impl Params {
    /// None yet.
    pub fn new() -> Params {
        Params::default()
    }

    /// As [`Params::new`], cut at another number of bytes: for tests.
    pub fn cut_at(bytes: u64) -> Params {
        Params { largest: Some(bytes), ..Params::default() }
    }

    /// Adds a tensor; gives its number.
    pub fn add(&mut self, name: &str, shape: Shape) -> Result<usize> {
        let n = shape.elements();
        let largest = self.largest.unwrap_or(MAX_WEIGHT_BUFFER) / 4;
        let refuse = |reason: String| Err(Error::Invalid { what: format!("parameter `{name}`"), reason });
        if self.params.iter().any(|p| p.name == name) {
            return refuse("the name is taken".into());
        }
        if n == 0 || n > largest {
            return refuse(format!("{n} elements; 1 to {largest} are possible"));
        }
        if self.arrays.last().is_none_or(|used| used + n > largest) {
            self.arrays.push(0);
        }
        let array = self.arrays.len() - 1;
        let offset = self.arrays[array];
        self.arrays[array] += n;
        self.params.push(Param { name: name.into(), shape, array, offset });
        Ok(self.params.len() - 1)
    }

    /// The tensors, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Param> {
        self.params.iter()
    }

    /// The tensor of a name.
    pub fn get(&self, name: &str) -> Option<&Param> {
        self.params.iter().find(|p| p.name == name)
    }

    /// Elements of each array.
    pub fn arrays(&self) -> &[u64] {
        &self.arrays
    }

    /// Name of the state array of values.
    pub fn values_name(array: usize) -> String {
        format!("values.{array}")
    }

    /// Names of the two state arrays of moments.
    pub fn moment_names(array: usize) -> [String; 2] {
        [format!("moment1.{array}"), format!("moment2.{array}")]
    }

    /// The values in a graph: their arrays, and each tensor as a window.
    pub fn bind(&self, g: &mut Graph) -> Result<Trainable> {
        let arrays = self
            .arrays
            .iter()
            .enumerate()
            .map(|(i, n)| Ok(g.state(&Self::values_name(i), Shape::new(&[*n])?, Category::Adapters)))
            .collect::<Result<Vec<Tensor>>>()?;
        let windows = self
            .params
            .iter()
            .map(|p| g.window(arrays[p.array], p.offset, p.shape))
            .collect::<Result<Vec<Tensor>>>()?;
        Ok(Trainable { arrays, windows })
    }
}

/// Parameters inside a graph.
#[derive(Clone, Debug)]
pub struct Trainable {
    arrays: Vec<Tensor>,
    /// The tensors, in the order of [`Params`].
    pub windows: Vec<Tensor>,
}

/// Which part of an optimizer step a program is. Gradients of the parts of one step carry on from one another in the
/// gradient arrays, so the bits are those of one batch of all their rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Part {
    /// All of it.
    #[default]
    Whole,
    /// The first group of micro-batches: gradients from zero, no update.
    First,
    /// A group between: gradients carried, no update.
    Middle,
    /// The last group: gradients carried, then the update.
    Last,
}

/// A program that computes `loss` (one element) and updates the parameters. Inputs: those of the graph and
/// [`HYPER_INPUT`] ([`AdamW::hyper`]). Outputs: `loss` and [`CONTROL`]. A step that is not finite changes nothing.
pub fn train_step(g: Graph, loss: Tensor, params: &Params, values: &Trainable, adamw: &AdamW) -> Result<Program> {
    train_part(g, loss, params, values, adamw, Part::Whole)
}

/// As [`train_step`], for a part of a step. Without the update the only output is `loss`.
pub fn train_part(
    g: Graph,
    loss: Tensor,
    params: &Params,
    values: &Trainable,
    adamw: &AdamW,
    part: Part,
) -> Result<Program> {
    train_part_with(g, loss, &[], params, values, adamw, part)
}

/// As [`train_part`], with further outputs.
pub fn train_part_with(
    g: Graph,
    loss: Tensor,
    also: &[(&str, Tensor)],
    params: &Params,
    values: &Trainable,
    adamw: &AdamW,
    part: Part,
) -> Result<Program> {
    if params.params.is_empty() {
        return Err(Error::Invalid { what: "train step".into(), reason: "there are no parameters to train".into() });
    }
    let (carry, updates) = (matches!(part, Part::Middle | Part::Last), matches!(part, Part::Whole | Part::Last));
    let mut outputs = vec![("loss", loss)];
    outputs.extend(also);
    g.both_ways(|mut g, recompute| {
        let mut outputs = outputs.clone();
        let scratch = |g: &mut Graph| -> Result<Vec<Tensor>> {
            let named = params.arrays.iter().enumerate();
            named
                .map(|(i, n)| Ok(g.scratch(&format!("gradients.{i}"), Shape::new(&[*n])?, Category::Gradients)))
                .collect()
        };
        let sunk: Vec<(Tensor, usize, u64)> =
            values.windows.iter().zip(&params.params).map(|(t, p)| (*t, p.array, p.offset)).collect();
        let mut sinks = Sinks { params: &sunk, arrays: scratch(&mut g)?, carry };
        g.gradients(loss, &[], recompute, Some(&mut sinks))?;
        let grads = sinks.arrays;
        if !updates {
            let mut program = g.outputs(&outputs)?.named("gradients");
            program.roots = grads;
            return Ok(program);
        }
        let hyper = g.input(HYPER_INPUT, [HYPER])?;
        let control = optimizer::control(&mut g, loss, &grads, adamw.max_norm)?;
        let mut arrays = Vec::with_capacity(grads.len());
        for (i, grads) in grads.into_iter().enumerate() {
            let shape = g.shape(values.arrays[i])?;
            let [m, v] = Params::moment_names(i);
            let m = g.state(&m, shape, Category::Optimizer);
            let v = g.state(&v, shape, Category::Optimizer);
            arrays.push(Arrays { grads, values: values.arrays[i], m, v });
        }
        optimizer::adamw(&mut g, adamw, &arrays, hyper, control)?;
        outputs.push((CONTROL, control));
        Ok(g.outputs(&outputs)?.named("train"))
    })
}
