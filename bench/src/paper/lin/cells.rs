//! The cells of the comparison: what each differs in from the one before.

use gpt2::batches::ShortSequences;
use gpt2::optim::OptimizerKind;
use gpt2::strategy::StrategyKind;
use rig::record::{Axis, Cell};

use crate::paper::options::Mixed;
use crate::plan::Draft;

/// How much shorter the sequences of the first phase are: 128 of 512 tokens.
const SHORTER: usize = 4;

/// The place of the last optimization in the ladder.
pub(super) const LAST: usize = 5;

/// The larger batch, after the last optimization.
pub(super) const LARGER_BATCH: usize = LAST + 1;

/// What decides which cells there are.
#[derive(Clone, Debug)]
pub(super) struct Choices {
    pub(super) links: Vec<String>,
    pub(super) steps: u64,
    pub(super) mixed: Mixed,
    pub(super) optimizer: OptimizerKind,
    pub(super) schedule: String,
    /// Micro-steps, where gradients are accumulated.
    pub(super) accumulation: usize,
    pub(super) ranks: usize,
    /// Numbers of ranks of the scaling.
    pub(super) scale_ranks: Vec<usize>,
    /// Sequences a step over all ranks.
    pub(super) batch: usize,
    /// Tokens of a sequence.
    pub(super) block: usize,
}

/// What a cell is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// One optimization after the other, by number; 0 is one device.
    Ladder(usize),
    /// All of them with the same batch on so many ranks.
    Strong(usize),
    /// All of them on so many ranks, each with as many sequences.
    Weak(usize),
    /// All of them, with short sequences in the first steps.
    Phases,
}

/// A cell that is wanted on one link.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) part: Part,
    /// In tables and pictures.
    pub(super) name: String,
    /// The link of the column that it stands in; one device talks to nobody, and stands in all of them.
    pub(super) link: String,
    pub(super) cell: Cell,
}

type Values = Vec<(Axis, String)>;

impl Choices {
    /// Sequences of one rank in the cells of `ranks`.
    fn share(&self) -> usize {
        self.batch / self.ranks
    }

    /// The first phase: nine tenths of all steps, as BERT is trained, but for enough steps of the second to have a median.
    pub(super) fn first_phase(&self) -> ShortSequences {
        let steps = (self.steps * 9 / 10).min(self.steps.saturating_sub(3)).max(1);
        ShortSequences { tokens: self.block / SHORTER, steps }
    }

    /// Whether every cell's batch can be divided among its ranks and micro-steps.
    ///
    /// # Errors
    /// Which option does not fit, for the user.
    pub(super) fn check(&self) -> Result<(), String> {
        let Choices { batch, block, accumulation, ranks, .. } = self;
        if *accumulation < 2 {
            return Err(format!("--accumulation {accumulation} must be at least 2"));
        }
        if self.scale_ranks.iter().any(|ranks| *ranks < 2) {
            return Err("--scale-ranks: every number must be at least 2; one device is always measured".into());
        }
        let all = self.scale_ranks.iter().chain([ranks]);
        if let Some(ranks) = all.clone().find(|ranks| !batch.is_multiple_of(**ranks * accumulation)) {
            let least = all.fold(1, |multiple, ranks| least_common_multiple(multiple, *ranks)) * accumulation;
            return Err(format!(
                "--batch {batch} cannot be divided evenly among {ranks} ranks and {accumulation} micro-steps; give a multiple of {least}"
            ));
        }
        if !block.is_multiple_of(SHORTER) {
            return Err(format!(
                "sequences of {block} tokens cannot be cut into four equal parts; choose another --preset"
            ));
        }
        Ok(())
    }

    /// The optimizations, each with all before it; the first is one device without any.
    fn ladder(&self) -> Vec<(String, Values)> {
        let text = |value: &dyn ToString| value.to_string();
        let mixed = self.mixed.precision();
        let larger = self.batch * self.accumulation;
        // As many tokens, and enough steps for a median.
        let fewer = (self.steps / self.accumulation as u64).max(6);
        let more: [(String, Values); LARGER_BATCH] = [
            ("+ data sharding".into(), Vec::new()),
            (
                format!("+ mixed precision ({mixed})"),
                vec![
                    (Axis::Precision, text(&mixed)),
                    (Axis::Wire, text(&mixed)),
                    (Axis::LossScaling, text(&self.mixed.loss_scaling())),
                ],
            ),
            ("+ fused operations".into(), vec![(Axis::Kernels, "fused".into())]),
            (
                format!("+ accumulation ({} micro-steps)", self.accumulation),
                vec![(Axis::Accumulation, text(&self.accumulation))],
            ),
            ("+ overlap".into(), vec![(Axis::Overlap, "true".into())]),
            (
                format!("+ {} times the batch", self.accumulation),
                vec![(Axis::Batch, text(&larger)), (Axis::Steps, text(&fewer))],
            ),
        ];
        let mut values = Values::new();
        let mut ladder = vec![("one device".to_string(), vec![(Axis::Strategy, text(&StrategyKind::Single))])];
        for (name, more) in more {
            values.extend(more);
            ladder.push((name, values.clone()));
        }
        ladder
    }

    /// Everything that is to run, but for its link.
    fn parts(&self) -> Vec<(Part, String, Values)> {
        let ladder = self.ladder();
        let all = ladder[LAST].1.clone();
        let with = |more: &[(Axis, String)]| [all.clone(), more.to_vec()].concat();
        let single = (Axis::Strategy, StrategyKind::Single.to_string());
        let batch = |sequences: usize| (Axis::Batch, sequences.to_string());
        let mut parts: Vec<(Part, String, Values)> = ladder
            .into_iter()
            .enumerate()
            .map(|(number, (name, values))| (Part::Ladder(number), name, values))
            .collect();
        let one =
            |part, sequences| (part, "one device, all optimizations".into(), with(&[single.clone(), batch(sequences)]));
        parts.push(one(Part::Strong(1), self.batch));
        parts.push(one(Part::Weak(1), self.share()));
        for ranks in &self.scale_ranks {
            let of = (Axis::Ranks, ranks.to_string());
            parts.push((Part::Strong(*ranks), format!("{ranks} ranks, same batch"), with(std::slice::from_ref(&of))));
            let weak = with(&[of, batch(self.share() * ranks)]);
            parts.push((Part::Weak(*ranks), format!("{ranks} ranks, batch in proportion"), weak));
        }
        let phases = with(&[(Axis::ShortSequences, self.first_phase().to_string())]);
        parts.push((Part::Phases, "all optimizations, in two phases".into(), phases));
        parts
    }

    /// Gives a plan these cells: that of `axes` is data sharding alone.
    pub(super) fn put(&self, draft: &mut Draft) {
        draft
            .set(Axis::Link, &self.links)
            .set(Axis::Ranks, &[self.ranks])
            .set(Axis::Batch, &[self.batch])
            .set(Axis::Block, &[self.block])
            .set(Axis::Steps, &[self.steps])
            .set(Axis::Optimizer, &[self.optimizer])
            .set(Axis::Schedule, &[&self.schedule])
            .without_also();
        for (_, _, values) in self.parts().iter().filter(|(_, _, values)| !values.is_empty()) {
            draft.also(values);
        }
    }

    /// The cells, link by link, of a plan that has been given them.
    ///
    /// # Errors
    /// A cell that cannot be, for the user.
    pub(super) fn wanted(&self, draft: &Draft) -> Result<Vec<Wanted>, String> {
        let mut wanted = Vec::new();
        for link in &self.links {
            for (part, name, values) in self.parts() {
                let mut one = draft.clone();
                one.without_also().set(Axis::Link, &[link]);
                for (axis, value) in &values {
                    one.set(*axis, std::slice::from_ref(value));
                }
                let cell = one.plan()?.cells.into_iter().next().ok_or("the plan has no cell")?;
                wanted.push(Wanted { part, name, link: link.clone(), cell });
            }
        }
        Ok(wanted)
    }
}

fn least_common_multiple(a: usize, b: usize) -> usize {
    let (mut larger, mut smaller) = (a, b);
    while smaller > 0 {
        (larger, smaller) = (smaller, larger % smaller);
    }
    a / larger.max(1) * b
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::plan::{Plan, READY};

    /// Those of the ready plan.
    pub(in crate::paper::lin) fn choices() -> Choices {
        Choices {
            links: ["lan-10g", "lan-1g", "lan-100m"].map(String::from).to_vec(),
            steps: 30,
            mixed: Mixed::Bf16,
            optimizer: OptimizerKind::Lamb,
            schedule: "cosine 0.01 0.001 2 30".into(),
            accumulation: 4,
            ranks: 2,
            scale_ranks: vec![2, 4],
            batch: 32,
            block: 64,
        }
    }

    fn draft(choices: &Choices) -> Draft {
        let mut draft = Draft::ready("lin").unwrap();
        choices.put(&mut draft);
        draft
    }

    #[test]
    fn the_command_runs_the_cells_of_the_ready_plan() {
        let (_, text) = READY.into_iter().find(|(name, _)| *name == "lin").unwrap();
        let ready: BTreeSet<Cell> = Plan::parse(text).unwrap().cells.into_iter().collect();
        let own: BTreeSet<Cell> = draft(&choices()).plan().unwrap().cells.into_iter().collect();
        assert_eq!(own, ready);
        // Three that talk to nobody, and 9 on each of 3 links.
        assert_eq!(own.len(), 3 + 3 * 9);
        let wanted = choices().wanted(&draft(&choices())).unwrap();
        assert!(wanted.iter().all(|wanted| own.contains(&wanted.cell)));
    }

    #[test]
    fn each_row_of_the_ladder_differs_from_the_one_before_in_one_thing() {
        let wanted = choices().wanted(&draft(&choices())).unwrap();
        let ladder: Vec<&Cell> = wanted
            .iter()
            .filter(|wanted| wanted.link == "lan-1g" && matches!(wanted.part, Part::Ladder(_)))
            .map(|wanted| &wanted.cell)
            .collect();
        let differs = |pair: &[&Cell]| Cell::varied(pair.iter().copied());
        let found: Vec<Vec<Axis>> = ladder.windows(2).map(differs).collect();
        let expected = [
            // One device has no network, and nothing to overlap.
            vec![Axis::Strategy, Axis::Transport, Axis::Link, Axis::Ranks, Axis::Overlap, Axis::Congestion],
            vec![Axis::Precision, Axis::Wire],
            vec![Axis::Kernels],
            vec![Axis::Accumulation],
            vec![Axis::Overlap],
            vec![Axis::Batch, Axis::Steps],
        ];
        assert_eq!(found, expected);
        assert!(ladder[..=LAST].iter().all(|cell| (cell.batch, cell.seed) == (32, ladder[0].seed)));
    }

    #[test]
    fn what_cannot_be_divided_is_told() {
        let told = |choices: Choices| choices.check().err().unwrap_or_default();
        assert_eq!(told(choices()), "");
        let cases = [
            (Choices { batch: 24, ..choices() }, "a multiple of 16"),
            (Choices { accumulation: 1, ..choices() }, "--accumulation 1"),
            (Choices { scale_ranks: vec![1], ..choices() }, "--scale-ranks"),
            (Choices { block: 30, ..choices() }, "cannot be cut into four equal parts"),
        ];
        for (wrong, expected) in cases {
            let why = told(wrong);
            assert!(why.contains(expected), "{why}");
        }
    }
}
