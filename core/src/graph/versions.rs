//! Refuses a graph that reads a value after something else was written over it.
//!
//! A node may write into the storage of its last operand. Whoever reads the operand later would get other numbers without a
//! word: the order of nodes decides, so it is looked at once, where a program is made.

use std::collections::HashMap;

use super::{Graph, Op, Tensor};
use crate::error::{Error, Result};

impl Graph {
    /// The node whose write each value stands for: itself, or below views the node that last wrote.
    fn versions(&self) -> Vec<Tensor> {
        let mut versions: Vec<Tensor> = Vec::with_capacity(self.nodes().len());
        for (i, node) in self.nodes().iter().enumerate() {
            versions.push(match &node.op {
                Op::View(_) | Op::Hook { .. } | Op::Custom(_) if node.into.is_none() => {
                    versions[node.inputs[0].index()]
                }
                _ => Tensor(i as u32),
            });
        }
        versions
    }

    /// Fails if a live node reads a value that an earlier one has written over.
    pub(super) fn check_versions(&self, outputs: impl Iterator<Item = Tensor>) -> Result<()> {
        let mut live = vec![false; self.nodes().len()];
        let mut read_last = Vec::new();
        for t in outputs {
            live[t.index()] = true;
            read_last.push(t);
        }
        for t in self.updates() {
            live[t.index()] = true;
        }
        for i in (0..live.len()).rev() {
            if live[i] {
                for t in &self.nodes()[i].inputs {
                    live[t.index()] = true;
                }
            }
        }
        let versions = self.versions();
        let mut newest: HashMap<Tensor, Tensor> = HashMap::new();
        let stale = |newest: &HashMap<Tensor, Tensor>, t: Tensor| {
            let root = self.storage(t).0;
            newest.get(&root).is_some_and(|last| *last != versions[t.index()])
        };
        for (i, node) in self.nodes().iter().enumerate().filter(|(i, _)| live[*i]) {
            // A view of something stale is not a read; whoever reads the view is looked at.
            let moves = matches!(node.op, Op::View(_) | Op::Hook { .. } | Op::Custom(_)) && node.into.is_none();
            if !moves && node.inputs.iter().any(|t| stale(&newest, *t)) {
                return Err(overwritten(&format!("{:?}", node.op)));
            }
            if node.into.is_some() {
                let t = Tensor(i as u32);
                newest.insert(self.storage(t).0, t);
            }
        }
        if read_last.iter().any(|t| stale(&newest, *t)) {
            return Err(overwritten("an output"));
        }
        Ok(())
    }
}

fn overwritten(reader: &str) -> Error {
    let reason = "reads a value after another was written over it; read the result of the write, or copy first".into();
    Error::Invalid { what: reader.into(), reason }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
mod tests {
    use crate::graph::{Graph, Region, Shape, Unary, View};

    fn region(shape: Shape) -> Region {
        Region { shape, view: View::dense(&shape), carry: true }
    }

    #[test]
    fn a_value_read_after_it_was_written_over_is_refused() {
        let build = |late: bool| {
            let mut g = Graph::new();
            let shape = Shape::new(&[2]).unwrap();
            let x = g.input("x", [2]).unwrap();
            let first = g.empty(shape);
            let first = g.place(x, first, region(shape)).unwrap();
            let early = g.unary(Unary::Exp, first).unwrap();
            let second = g.place(x, first, region(shape)).unwrap();
            let late = if late { g.unary(Unary::Exp, first).unwrap() } else { early };
            g.outputs(&[("a", early), ("b", second), ("c", late)])
        };
        assert!(build(false).is_ok());
        assert!(build(true).unwrap_err().to_string().contains("written over"));
    }

    #[test]
    fn what_a_caller_still_holds_is_copied_before_it_is_written_into() {
        let mut g = Graph::new();
        let shape = Shape::new(&[2]).unwrap();
        let x = g.input("x", [2]).unwrap();
        let y = g.unary(Unary::Tanh, x).unwrap();
        let z = g.place(x, y, region(shape)).unwrap();
        let both = g.add(y, z).unwrap();
        assert!(g.outputs(&[("sum", both)]).is_ok());
    }
}
