//! What the rows came to, link by link.

use std::ops::Range;

use gpt2::strategy::StrategyKind;
use gpt2::trainer::TrainConfig;
use rig::flag::FlagKind;
use rig::record::Record;
use rig::stats::median;
use rig::training::config;

use super::cells::{LARGER_BATCH, LAST, Part, Wanted};
use crate::paper::row::{Row, Run, Variant};
use crate::paper::text::{times, verdict};

/// A row on one link.
pub(super) struct Entry {
    pub(super) wanted: Wanted,
    pub(super) row: Row,
    /// Whether its ranks share cores.
    pub(super) crowded: bool,
}

/// All rows.
pub(super) struct Found {
    pub(super) links: Vec<String>,
    entries: Vec<Entry>,
}

/// What a row is against another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Gain {
    /// Tokens a second over those of the other.
    pub(super) times: f64,
    /// `faster`, `slower`, or that it cannot be told.
    pub(super) told: &'static str,
}

impl Gain {
    pub(super) fn words(&self) -> String {
        format!("{} ({})", times(self.times), self.told)
    }
}

impl Found {
    /// The rows of these records, each judged beside one device in f32 where it trains on the same batches.
    ///
    /// # Errors
    /// A cell has no record, or names what there is not.
    pub(super) fn of(
        wanted: Vec<Wanted>,
        records: &[Record],
        vocabulary: usize,
        links: Vec<String>,
    ) -> Result<Self, String> {
        let mut entries: Vec<Entry> = Vec::new();
        let mut first: Option<(TrainConfig, Option<Run>)> = None;
        for wanted in wanted {
            let record = records.iter().find(|record| record.cell == wanted.cell);
            let record = record.ok_or_else(|| format!("the plan has no cell of {} on {}", wanted.name, wanted.link))?;
            let own = config(&record.cell, vocabulary)?;
            let base = first.as_ref().map(|(first, _)| alike(wanted.part, &own, first));
            // Rows with other batches have no losses in common with it.
            let same = matches!(wanted.part, Part::Ladder(..=LAST) | Part::Strong(_));
            let reference = first.as_ref().and_then(|(_, run)| run.as_ref()).filter(|_| same);
            let row = Row::of(&variant(&wanted)?, record, vocabulary, base.as_ref(), reference)?;
            if first.is_none() {
                first = Some((own, row.summary.clone()));
            }
            let crowded = record.flags.iter().any(|flag| flag.kind == FlagKind::SharedCores);
            entries.push(Entry { wanted, row, crowded });
        }
        Ok(Found { links, entries })
    }

    /// Every row once: one device stands in the tables of all links.
    pub(super) fn rows(&self) -> impl Iterator<Item = &Row> {
        self.each_once().map(|index| &self.entries[index].row)
    }

    pub(super) fn into_rows(self) -> Vec<Row> {
        let kept: Vec<usize> = self.each_once().collect();
        let rows = self.entries.into_iter().enumerate().filter(|(index, _)| kept.contains(index));
        rows.map(|(_, entry)| entry.row).collect()
    }

    fn each_once(&self) -> impl Iterator<Item = usize> {
        let is_first = |index: &usize| {
            let cell = &self.entries[*index].wanted.cell;
            self.entries[..*index].iter().all(|earlier| earlier.wanted.cell != *cell)
        };
        (0..self.entries.len()).filter(is_first)
    }

    /// A row of a link that has figures.
    pub(super) fn get(&self, part: Part, link: &str) -> Option<(&Entry, &Run)> {
        let entry = self.entries.iter().find(|entry| entry.wanted.part == part && entry.wanted.link == link)?;
        Some((entry, entry.row.summary.as_ref()?))
    }

    /// The rows of a link that are of this kind and have figures.
    pub(super) fn all<'f>(
        &'f self,
        link: &'f str,
        is: impl Fn(Part) -> bool + 'f,
    ) -> impl Iterator<Item = (&'f Entry, &'f Run)> {
        let here = self.entries.iter().filter(move |entry| entry.wanted.link == link && is(entry.wanted.part));
        here.filter_map(|entry| Some((entry, entry.row.summary.as_ref()?)))
    }

    /// What an optimization gains over the row before it.
    pub(super) fn gain(&self, number: usize, link: &str) -> Option<Gain> {
        let before = number.checked_sub(1)?;
        self.against(Part::Ladder(number), Part::Ladder(before), link)
    }

    /// A row against another of the link, in tokens a second.
    pub(super) fn against(&self, part: Part, other: Part, link: &str) -> Option<Gain> {
        let ((a, a_run), (b, b_run)) = (self.get(part, link)?, self.get(other, link)?);
        let times = a_run.tokens_per_s / b_run.tokens_per_s;
        let quartiles = a.row.quartiles().zip(b.row.quartiles());
        let told = quartiles.map_or("too few steps to tell", |(of, over)| verdict(times, of, over));
        times.is_finite().then_some(Gain { times, told })
    }

    /// The phases of a link's row that has two.
    pub(super) fn phases(&self, link: &str) -> Option<[Phase; 2]> {
        let (entry, run) = self.get(Part::Phases, link)?;
        let config = &entry.row.config;
        let short = config.short_sequences?;
        let all = run.seconds.len();
        let first = usize::try_from(short.steps).unwrap_or(all).min(all);
        let tokens = (config.global_batch * config.model.block_size) as f64;
        let phase = |tokens_of_one: usize, steps: Range<usize>| {
            let of_steps = steps.clone().filter(|step| *step >= 2);
            let taken: Vec<f64> = of_steps.map(|step| run.seconds[step] - run.seconds[step - 1]).collect();
            Phase {
                tokens: tokens_of_one,
                steps: steps.len(),
                tokens_per_s: median(&taken).map(|seconds| tokens / seconds),
                loss: steps.last().and_then(|step| run.losses.get(step).copied()),
            }
        };
        Some([phase(short.tokens, 0..first), phase(config.model.block_size, first..all)])
    }

    /// Speed over that of one device by the number of ranks.
    pub(super) fn efficiency(&self, part: Part, link: &str) -> Option<f64> {
        let (ranks, one) = match part {
            Part::Strong(ranks) => (ranks, Part::Strong(1)),
            Part::Weak(ranks) => (ranks, Part::Weak(1)),
            Part::Ladder(_) | Part::Phases => return None,
        };
        Some(self.against(part, one, link)?.times / ranks as f64)
    }
}

/// One of two phases.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Phase {
    /// Of a sequence.
    pub(super) tokens: usize,
    pub(super) steps: usize,
    /// By the median of its steps but the run's first two.
    pub(super) tokens_per_s: Option<f64>,
    /// Of its last step.
    pub(super) loss: Option<f64>,
}

/// How long a step waits for other ranks, on the rank where that is longest.
pub(super) fn exposed(run: &Run) -> f64 {
    run.ranks.iter().map(|rank| rank.parts.exposed + rank.parts.scalars).fold(0.0, f64::max)
}

/// What the rank sends a step that sends most, in bytes a token of the step.
pub(super) fn bytes_per_token(row: &Row, run: &Run) -> f64 {
    let most = run.ranks.iter().map(|rank| rank.bytes_expected).max().unwrap_or(0);
    most as f64 / (row.config.global_batch * row.config.model.block_size) as f64
}

/// One device's configuration with what a row is about taken from the row: all else has to be the same.
fn alike(part: Part, own: &TrainConfig, first: &TrainConfig) -> TrainConfig {
    let alike = TrainConfig { kernels: own.kernels, accumulation: own.accumulation, ..first.clone() };
    match part {
        Part::Ladder(..=LAST) | Part::Strong(_) => alike,
        Part::Ladder(_) => TrainConfig { global_batch: own.global_batch, steps: own.steps, ..alike },
        Part::Weak(_) => TrainConfig { global_batch: own.global_batch, ..alike },
        Part::Phases => TrainConfig { short_sequences: own.short_sequences, ..alike },
    }
}

fn variant(wanted: &Wanted) -> Result<Variant, String> {
    let paper = match wanted.part {
        Part::Ladder(0) => "-",
        Part::Ladder(..LARGER_BATCH) => "an optimization of its own",
        Part::Ladder(_) => "what accumulation makes possible",
        Part::Strong(_) | Part::Weak(_) => "scaling",
        Part::Phases => "two phases",
    };
    let strategy: StrategyKind = wanted.cell.strategy.parse()?;
    Ok(Variant {
        name: format!("{}, {}", wanted.name, wanted.link),
        precision: wanted.cell.precision.parse()?,
        ..Variant::new(strategy, paper)
    })
}

#[cfg(test)]
mod tests {
    use rig::flag::Flag;
    use rig::record::{Measured, Rank, Trained, TrainedRank};

    use super::super::cells::tests::choices;
    use super::*;
    use crate::paper::text::UNDECIDED;
    use crate::plan::Draft;

    /// A record of every cell: steps of so many milliseconds, by link and by number of ranks.
    fn records(ms: impl Fn(&Wanted) -> f64, wanted: &[Wanted]) -> Vec<Record> {
        let one = |wanted: &Wanted| {
            let cell = &wanted.cell;
            let steps = cell.steps as usize;
            let ms = ms(wanted);
            let tokens = (cell.batch * cell.model.block.unwrap()) as f64;
            let ranks = (0..cell.ranks).map(|rank| Rank {
                rank,
                payload_expected: 3_000_000,
                payload_bytes: Some(3_000_000),
                trained: Some(TrainedRank { optimizer_steps: (cell.steps, cell.steps), ..TrainedRank::default() }),
                ..Rank::default()
            });
            let measured = Measured {
                losses: (0..steps).map(|step| Some(5.0 - 0.01 * step as f64)).collect(),
                grad_norms: vec![Some(1.0); steps],
                seconds: seconds(wanted, ms),
                ranks: ranks.collect(),
                trained: Some(Trained {
                    step_ms: Some(ms),
                    tokens_per_s: Some(tokens / ms * 1e3),
                    epochs: vec![1; steps],
                    ..Trained::default()
                }),
                ..Measured::default()
            };
            let crowded = Flag { kind: FlagKind::SharedCores, what: "4 rank(s) share 2 cores".into() };
            Record {
                measured: Some(measured),
                flags: if cell.ranks > 2 { vec![crowded] } else { Vec::new() },
                ..rig::stats::made_up::record(cell.clone(), 1, &[ms])
            }
        };
        wanted.iter().map(one).collect()
    }

    /// The first phase is twice as fast.
    fn seconds(wanted: &Wanted, ms: f64) -> Vec<f64> {
        let short = wanted.cell.short_sequences.map_or(0, |short| short.steps);
        let mut sum = 0.0;
        let each = (0..wanted.cell.steps).map(|step| if step < short { ms / 2e3 } else { ms / 1e3 });
        each.map(|seconds| {
            sum += seconds;
            sum
        })
        .collect()
    }

    /// Planted: fused operations halve the step, overlap hides half of what is left on the slow link, scaling is what the numbers say.
    fn planted() -> Found {
        let choices = choices();
        let mut draft = Draft::ready("lin").unwrap();
        choices.put(&mut draft);
        let wanted = choices.wanted(&draft).unwrap();
        let ms = |wanted: &Wanted| match (wanted.part, wanted.link.as_str()) {
            (Part::Ladder(0), _) => 400.0,
            (Part::Ladder(1 | 2), _) => 200.0,
            (Part::Ladder(3 | 4), _) => 100.0,
            (Part::Ladder(LAST), "lan-100m") | (Part::Strong(2) | Part::Weak(2), "lan-100m") => 50.0,
            (Part::Ladder(LARGER_BATCH), _) => 200.0,
            (Part::Strong(1), _) => 180.0,
            (Part::Weak(1), _) => 90.0,
            _ => 100.0,
        };
        // Cells that are wanted twice have one record.
        let records = records(ms, &wanted);
        Found::of(wanted, &records, 256, choices.links).unwrap()
    }

    #[test]
    fn gains_and_efficiencies_are_those_that_were_planted() {
        let found = planted();
        let near = |value: Option<f64>, expected: f64| assert!((value.unwrap() - expected).abs() < 1e-9, "{value:?}");
        near(found.gain(1, "lan-1g").map(|gain| gain.times), 2.0);
        near(found.gain(3, "lan-1g").map(|gain| gain.times), 2.0);
        near(found.gain(LAST, "lan-1g").map(|gain| gain.times), 1.0);
        near(found.gain(LAST, "lan-100m").map(|gain| gain.times), 2.0);
        // Four times the tokens in twice the time.
        near(found.gain(LARGER_BATCH, "lan-1g").map(|gain| gain.times), 2.0);
        near(found.efficiency(Part::Strong(2), "lan-1g"), 0.9);
        near(found.efficiency(Part::Weak(2), "lan-1g"), 0.9);
        near(found.efficiency(Part::Strong(4), "lan-1g"), 0.45);
        near(found.efficiency(Part::Weak(4), "lan-1g"), 0.9);
        assert_eq!(found.gain(0, "lan-1g"), None);
        assert_eq!(found.gain(LAST, "lan-1g").unwrap().told, UNDECIDED);
        assert_eq!(found.gain(LAST, "lan-100m").unwrap().told, "faster");
    }

    #[test]
    fn phases_have_their_own_steps() {
        let [first, second] = planted().phases("lan-1g").unwrap();
        assert_eq!((first.tokens, first.steps, second.tokens, second.steps), (16, 27, 64, 3));
        let speed = |phase: Phase| phase.tokens_per_s.unwrap().round();
        assert_eq!((speed(first), speed(second)), (40_960.0, 20_480.0));
        assert_eq!((first.loss, second.loss), (Some(5.0 - 0.01 * 26.0), Some(5.0 - 0.01 * 29.0)));
    }

    #[test]
    fn rows_are_sound_and_told_once_and_crowds_are_known() {
        let found = planted();
        let rows: Vec<&Row> = found.rows().collect();
        assert_eq!(rows.len(), 3 + 3 * 9);
        assert!(rows.iter().all(|row| row.is_sound()), "{:?}", rows.iter().find(|row| !row.is_sound()));
        assert!(found.get(Part::Strong(4), "lan-1g").unwrap().0.crowded);
        assert!(!found.get(Part::Strong(2), "lan-1g").unwrap().0.crowded);
        let (entry, run) = found.get(Part::Ladder(LARGER_BATCH), "lan-1g").unwrap();
        let (before, its) = found.get(Part::Ladder(LAST), "lan-1g").unwrap();
        assert_eq!(4.0 * bytes_per_token(&entry.row, run), bytes_per_token(&before.row, its));
    }

    #[test]
    fn a_row_that_trains_something_else_is_noticed() {
        let choices = choices();
        let mut draft = Draft::ready("lin").unwrap();
        choices.put(&mut draft);
        let mut wanted = choices.wanted(&draft).unwrap();
        wanted.retain(|wanted| wanted.link == "lan-1g");
        wanted[3].cell.seed = 7;
        let records = records(|_| 100.0, &wanted);
        let found = Found::of(wanted, &records, 256, vec!["lan-1g".into()]).unwrap();
        let off: Vec<&Row> = found.rows().filter(|row| !row.is_sound()).collect();
        assert!(off.len() == 1 && off[0].name.contains("fused operations"), "{off:?}");
    }
}
