//! What strategies learn from the same tokens, what they send for it and how long it takes: of plans that run each cell with several seeds.

use std::cmp::Ordering;

use gpt2::strategy::Staleness;
use rig::record::{Axis, Cell, Measured, Rank};
use rig::stats::{Interval, LEVEL, RunValue, interval, paired};
use rig::text::{grid, wrapped};

use super::bandwidth;
use super::case::{Comparison, ROUNDS};
use super::digest::{Case, Digest, Grouped, Run, distinct, is_timing_only, meaningless};
use super::html::{Page, Table};
use super::text::{all_of, count, figure, maybe};

/// Columns of a terminal.
const WIDTH: usize = 80;

/// What others are compared with.
const REFERENCE: &str = "ddp";

/// Axes on which a row may differ from the one that it is compared with.
const COMPARED: [Axis; 6] =
    [Axis::Seed, Axis::Strategy, Axis::Compress, Axis::SyncEvery, Axis::Staleness, Axis::DedicatedServer];

/// Training losses that are averaged where the losses of two runs at one time are compared.
const SMOOTHED: usize = 10;

/// The least difference of losses that is told, in nats a token: others are 0 in three digits.
const LEAST: f64 = 5e-4;

/// How figures are written that are missing.
const NONE: &str = "–";

/// Rows of a plan with several seeds, the shortest time first.
pub(super) struct Seeds<'d, 'a> {
    rows: Vec<Row<'d, 'a>>,
    /// Axes that tell rows apart.
    axes: Vec<Axis>,
}

/// Cells that differ in their seed alone.
struct Row<'d, 'a> {
    name: String,
    /// One of them, with figures where there are any.
    case: &'d Case<'a>,
    /// Validation loss at the end, by seed; the mean over rounds of the same seed.
    losses: Vec<RunValue>,
    /// From the beginning of the first step to the end of the last one, likewise.
    seconds: Vec<RunValue>,
    /// A run of each seed.
    runs: Vec<(u32, &'a Measured)>,
    /// Payload bytes a step of all ranks, and of the one that sends most.
    sent: Option<(f64, f64)>,
    staleness: Option<Staleness>,
}

/// A row beside another one, seed by seed.
struct Beside {
    /// By how much its loss is higher.
    loss: Interval,
    time: Comparison,
    /// By how much its training loss is higher at its end than that of the other after as many seconds; `None` where the other had ended by then.
    same_time: Option<Interval>,
}

/// What a row is worth beside another one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Worth {
    /// One of time and loss is lower, and the other was not found to be higher.
    Pays,
    /// One is lower and the other higher.
    Trades,
    /// One is higher, and the other was not found to be lower.
    DoesNotPay,
    /// Neither was found to differ.
    Open,
    /// There are too few seeds that both have.
    NotCompared,
}

impl<'d, 'a> Seeds<'d, 'a> {
    /// Nothing where no cells differ in their seed alone, or none says a validation loss.
    pub(super) fn of(digest: &'d Digest<'a>) -> Option<Self> {
        if !digest.axes.contains(&Axis::Seed) {
            return None;
        }
        let seeds = distinct(digest.cases.iter().map(|case| case.cell.seed));
        let groups = digest.groups(&[Axis::Seed]);
        let mut rows: Vec<Row<'_, '_>> = groups.iter().filter_map(|group| Row::of(digest, group, &seeds)).collect();
        rows.sort_by(|a, b| a.mean_seconds().total_cmp(&b.mean_seconds()));
        let several = rows.iter().any(|row| row.losses.len() > 1);
        several.then(|| Seeds { rows, axes: digest.axes.clone() })
    }

    /// The row of a strategy without compression that is otherwise set up as this one.
    fn plain(&self, row: &Row<'d, 'a>, strategy: &str) -> Option<&Row<'d, 'a>> {
        let alike = |other: &&Row<'_, '_>| {
            let (cell, own) = (other.case.cell, row.case.cell);
            let free = [meaningless(cell), meaningless(own)].concat();
            let mut axes = self.axes.iter().filter(|axis| !COMPARED.contains(axis) && !free.contains(axis));
            cell.strategy == strategy
                && cell.compress.is_none()
                && axes.all(|axis| cell.value(*axis) == own.value(*axis))
        };
        self.rows.iter().find(alike)
    }

    /// A row beside the reference; nothing of the reference itself.
    fn to_reference(&self, row: &Row<'d, 'a>) -> Option<Beside> {
        let reference = self.plain(row, REFERENCE).filter(|reference| !std::ptr::eq(*reference, row))?;
        row.beside(reference)
    }
}

impl<'d, 'a> Row<'d, 'a> {
    fn of(digest: &'d Digest<'a>, group: &Grouped<'a, 'd>, seeds: &[u64]) -> Option<Self> {
        let cases: Vec<&Case<'_>> = group.cases.iter().copied().filter(|case| !is_timing_only(case.cell)).collect();
        let case = cases.iter().find(|case| !case.good.is_empty()).or(cases.first()).copied()?;
        let by_seed = |one: &dyn Fn(&Run<'_>) -> Option<f64>| {
            let of_seed = |(number, seed): (u32, &u64)| {
                let of = cases.iter().filter(|case| case.cell.seed == *seed).flat_map(|case| &case.good);
                let values: Vec<f64> = of.filter_map(one).filter(|value| value.is_finite()).collect();
                let mean = values.iter().sum::<f64>() / values.len() as f64;
                (!values.is_empty()).then(|| RunValue::counted(number, mean))
            };
            (1..).zip(seeds).filter_map(of_seed).collect::<Vec<RunValue>>()
        };
        let run = |(number, seed): (u32, &u64)| {
            let good = cases.iter().filter(|case| case.cell.seed == *seed).find_map(|case| case.good.first());
            Some((number, good?.measured))
        };
        let ranks = || cases.iter().flat_map(|case| &case.good).flat_map(|run| &run.measured.ranks);
        let staleness = ranks().filter_map(|rank| rank.staleness).reduce(|mut all, one| {
            all.add(one);
            all
        });
        Some(Row {
            name: name(digest, group.like),
            case,
            losses: by_seed(&|run| run.measured.trained.as_ref()?.validations.last()?.1),
            seconds: by_seed(&|run| run.measured.seconds.last().copied()),
            runs: (1..).zip(seeds).filter_map(run).collect(),
            sent: bytes(case, |ranks| ranks.into_iter().sum()).zip(bandwidth::sent(case)),
            staleness,
        })
    }

    fn mean_seconds(&self) -> f64 {
        interval(&self.seconds, LEVEL).map_or(f64::INFINITY, |seconds| seconds.estimate)
    }

    fn beside(&self, other: &Row<'_, '_>) -> Option<Beside> {
        let losses = paired(&other.losses, &self.losses, LEVEL)?;
        let times = paired(&other.seconds, &self.seconds, LEVEL)?;
        let (loss, ratio) = (ended(losses.difference, losses.rounds), ended(times.ratio?, times.rounds));
        let verdict = side(&ratio, 1.0) as i32;
        let time = Comparison { ratio, difference: times.difference, rounds: times.rounds, verdict };
        Some(Beside { loss, time, same_time: self.after_as_many_seconds(other) })
    }

    fn after_as_many_seconds(&self, other: &Row<'_, '_>) -> Option<Interval> {
        let both = self.runs.iter().filter_map(|(number, own)| {
            let (_, theirs) = other.runs.iter().find(|(known, _)| known == number)?;
            let end = own.seconds.last()?;
            let steps = theirs.seconds.iter().filter(|second| *second <= end).count();
            let running = (steps < theirs.seconds.len()).then_some(steps)?;
            let values = (smoothed(own, own.losses.len())?, smoothed(theirs, running)?);
            Some((RunValue::counted(*number, values.0), RunValue::counted(*number, values.1)))
        });
        let (own, theirs): (Vec<RunValue>, Vec<RunValue>) = both.unzip();
        let found = paired(&theirs, &own, LEVEL)?;
        Some(ended(found.difference, found.rounds))
    }
}

impl Beside {
    fn time_side(&self) -> Ordering {
        side(&self.time.ratio, 1.0)
    }

    fn loss_side(&self) -> Ordering {
        if self.loss.estimate.abs() < LEAST { Ordering::Equal } else { side(&self.loss, 0.0) }
    }

    fn worth(&self) -> Worth {
        match (self.time_side(), self.loss_side()) {
            _ if !(self.time.ratio.has_ends() && self.loss.has_ends()) => Worth::NotCompared,
            (Ordering::Equal, Ordering::Equal) => Worth::Open,
            (Ordering::Less, Ordering::Greater) | (Ordering::Greater, Ordering::Less) => Worth::Trades,
            (Ordering::Less, _) | (_, Ordering::Less) => Worth::Pays,
            (Ordering::Greater, _) | (_, Ordering::Greater) => Worth::DoesNotPay,
        }
    }

    /// `0.45 times the time, loss +0.103`; of what was not found to differ, between which values it may lie. Of rows that are compared.
    fn words(&self) -> String {
        let Interval { estimate, low, high, .. } = self.time.ratio;
        let time = match self.time_side() {
            Ordering::Equal => {
                let digits = digits(&[low, high], 1.0, 2);
                format!("{low:.digits$} to {high:.digits$} times the time")
            }
            _ => format!("{estimate:.2} times the time"),
        };
        let Interval { estimate, low, high, .. } = self.loss;
        let loss = match self.loss_side() {
            Ordering::Equal if low.abs().max(high.abs()) < LEAST => "the same loss to three digits".into(),
            Ordering::Equal => {
                let [low, high] = signed([low, high]);
                format!("loss {low} to {high}")
            }
            _ => format!("loss {}", signed([estimate])[0]),
        };
        let decided = self.same_time.filter(|found| side(found, 0.0) != Ordering::Equal);
        match decided.filter(|_| self.worth() == Worth::Trades) {
            Some(found) => {
                let [estimate] = signed([found.estimate]);
                format!("{time}, {loss}; training loss {estimate} beside it after as many seconds")
            }
            None => format!("{time}, {loss}"),
        }
    }
}

/// The mean training loss of the last steps up to the one of this number.
fn smoothed(measured: &Measured, end: usize) -> Option<f64> {
    let last = measured.losses.get(end.saturating_sub(SMOOTHED)..end)?;
    let known = last.iter().copied().collect::<Option<Vec<f64>>>().filter(|known| !known.is_empty())?;
    Some(known.iter().sum::<f64>() / known.len() as f64)
}

/// On which side of `neutral` an interval lies; `Equal` where it holds it, or has no ends.
fn side(interval: &Interval, neutral: f64) -> Ordering {
    match interval {
        Interval { low, .. } if *low > neutral => Ordering::Greater,
        Interval { high, .. } if *high < neutral => Ordering::Less,
        _ => Ordering::Equal,
    }
}

/// An interval of so many seeds, without ends where there are few.
fn ended(interval: Interval, seeds: usize) -> Interval {
    if seeds < ROUNDS { interval.without_ends() } else { interval }
}

/// Strategy and compression, and what else tells the row of a cell apart.
fn name(digest: &Digest<'_>, cell: &Cell) -> String {
    let mut told = vec![Axis::Seed, Axis::Strategy, Axis::Compress];
    if !digest.axes.contains(&Axis::Ranks) {
        told.push(Axis::Ranks);
    }
    let rest = digest.label_without(cell, &told);
    let name = bandwidth::name(cell);
    if rest.is_empty() { name } else { format!("{name} {rest}") }
}

/// What `over_ranks` makes of the payload bytes that each rank sends a step.
fn bytes(case: &Case<'_>, over_ranks: impl Fn(Vec<f64>) -> f64) -> Option<f64> {
    let sent = |rank: &Rank| rank.payload_bytes.map(|bytes| bytes as f64);
    case.by_rank(sent, |ranks| Some(over_ranks(ranks)))
}

/// Losses with their sign.
fn signed<const N: usize>(losses: [f64; N]) -> [String; N] {
    let digits = digits(&losses, 0.0, 3);
    losses.map(|loss| format!("{loss:+.digits$}"))
}

/// As many digits, at least so many, as it takes to see that values are not `neutral`.
fn digits(values: &[f64], neutral: f64, least: usize) -> usize {
    let hidden = |digits: &usize| {
        let near = 0.5 * 10f64.powi(-(*digits as i32));
        values.iter().any(|value| *value != neutral && (value - neutral).abs() < near)
    };
    (least..6).find(|digits| !hidden(digits)).unwrap_or(6)
}

/// What is found, in words; nothing where no cells differ in their seed alone.
pub(super) fn sentences(digest: &Digest<'_>) -> Option<Vec<String>> {
    Seeds::of(digest).map(|seeds| found(&seeds))
}

/// The table for a terminal.
pub(super) fn text(digest: &Digest<'_>) -> Option<String> {
    let seeds = Seeds::of(digest)?;
    let head = ["", "loss", "less ddp's", "MB", "busiest", "s", "of ddp's"].map(String::from);
    let line = |row: &Row<'_, '_>| {
        let beside = seeds.to_reference(row);
        let (all, most) = row.sent.unzip();
        let loss = beside.as_ref().map(|beside| match beside.loss.has_ends() {
            true => format!("{} ±{:.3}", signed([beside.loss.estimate])[0], beside.loss.width() / 2.0),
            false => signed([beside.loss.estimate])[0].clone(),
        });
        let mean = |values: &[RunValue]| interval(values, LEVEL).map(|values| values.estimate);
        vec![
            row.name.clone(),
            mean(&row.losses).map_or(NONE.into(), |loss| format!("{loss:.3}")),
            loss.unwrap_or_else(|| NONE.into()),
            maybe(all.map(|bytes| bytes / 1e6)),
            maybe(most.map(|bytes| bytes / 1e6)),
            maybe(mean(&row.seconds)),
            beside.map_or(NONE.into(), |beside| format!("{:.2}", beside.time.ratio.estimate)),
        ]
    };
    let lines: Vec<Vec<String>> = seeds.rows.iter().map(line).collect();
    let title = "\nValidation loss, MB sent a step by all ranks and by the busiest, seconds:";
    let mut text = vec![title.into(), grid(&head, &lines)];
    text.extend(stale(&seeds).map(|sentence| wrapped(&sentence, WIDTH)));
    let crowds = distinct(seeds.rows.iter().filter_map(|row| row.case.crowd.clone()));
    text.extend(all_of(&crowds).map(|crowds| format!("{crowds}: ranks also wait for the processor.")));
    Some(text.join("\n"))
}

/// What is found, in words.
fn found(seeds: &Seeds<'_, '_>) -> Vec<String> {
    let mut said: Vec<String> = seeds.rows.iter().filter_map(|row| reference(seeds, row)).collect();
    let strategies = seeds.rows.iter().filter(|row| row.case.cell.compress.is_none());
    let strategies = strategies.filter_map(|row| Some((row, seeds.to_reference(row)?))).collect();
    said.extend(told(strategies, &format!("Beside {REFERENCE}")));
    let compressed = seeds.rows.iter().filter(|row| row.case.cell.compress.is_some());
    let compressed =
        compressed.filter_map(|row| Some((row, row.beside(seeds.plain(row, &row.case.cell.strategy)?)?))).collect();
    said.extend(told(compressed, "Beside the same strategy without compression"));
    said
}

/// What the reference has learnt and what it took, where a row is one.
fn reference(seeds: &Seeds<'_, '_>, row: &Row<'_, '_>) -> Option<String> {
    let cell = row.case.cell;
    if cell.strategy != REFERENCE || cell.compress.is_some() || seeds.to_reference(row).is_some() {
        return None;
    }
    let loss = ended(interval(&row.losses, LEVEL)?, row.losses.len());
    let seconds = ended(interval(&row.seconds, LEVEL)?, row.seconds.len());
    let words = row.case.traits.words().map_or(String::new(), |words| format!(" ({words})"));
    let tokens = row.case.good.first()?.measured.tokens_per_step * cell.steps;
    let sends = row.sent.map_or(String::new(), |(all, _)| format!("; its ranks send {} MB a step", figure(all / 1e6)));
    Some(format!(
        "On {}{words} over {}, {} has after {} tokens ({}, {}) a validation loss of {}, in {} s{sends}.",
        cell.link,
        cell.transport,
        row.name,
        figure(tokens as f64),
        count(usize::try_from(cell.steps).unwrap_or(usize::MAX), "step"),
        count(row.losses.len(), "seed"),
        loss_text(&loss),
        super::text::interval(&seconds),
    ))
}

/// What each is worth beside what it is compared with, the like together.
fn told(rows: Vec<(&Row<'_, '_>, Beside)>, beside: &str) -> Vec<String> {
    let of = |(worth, words): (Worth, &str)| {
        let here = rows.iter().filter(|(_, beside)| beside.worth() == worth);
        let here: Vec<String> = here.map(|(row, beside)| format!("{} ({})", row.name, beside.words())).collect();
        (!here.is_empty()).then(|| format!("{beside}, with the same tokens, {words}: {}.", here.join("; ")))
    };
    let too_few = rows.iter().filter(|(_, beside)| beside.worth() == Worth::NotCompared);
    let too_few: Vec<String> = too_few.map(|(row, _)| row.name.clone()).collect();
    let too_few = all_of(&too_few)
        .map(|names| format!("{beside}, fewer than {ROUNDS} seeds in common, so that nothing is claimed: {names}."));
    let kinds = [
        (Worth::Pays, "these pay"),
        (Worth::Trades, "these trade one for the other"),
        (Worth::DoesNotPay, "these do not pay"),
        (Worth::Open, "no difference was found of these"),
    ];
    kinds.into_iter().filter_map(of).chain(too_few).collect()
}

/// How stale the parameters were on which gradients were computed.
fn stale(seeds: &Seeds<'_, '_>) -> Option<String> {
    let of = |row: &Row<'_, '_>| row.staleness.map(|stale| format!("{} {}", row.name, stale_text(&stale)));
    let told: Vec<String> = seeds.rows.iter().filter_map(of).collect();
    (!told.is_empty()).then(|| format!("Staleness in steps: {}.", told.join("; ")))
}

/// `1.24 (at most 2)`.
fn stale_text(staleness: &Staleness) -> String {
    format!("{} (at most {})", figure(staleness.mean()), staleness.max)
}

/// `2.613 [2.600, 2.626]`, or the estimate alone.
fn loss_text(loss: &Interval) -> String {
    let Interval { estimate, low, high, .. } = loss;
    if loss.has_ends() { format!("{estimate:.3} [{low:.3}, {high:.3}]") } else { format!("{estimate:.3}") }
}

/// `+0.103 [+0.080, +0.126]`, or the estimate alone.
fn difference_text(loss: &Interval) -> String {
    if !loss.has_ends() {
        return signed([loss.estimate])[0].clone();
    }
    let [estimate, low, high] = signed([loss.estimate, loss.low, loss.high]);
    format!("{estimate} [{low}, {high}]")
}

/// Every figure with its interval.
fn table(seeds: &Seeds<'_, '_>) -> Table {
    let has_staleness = seeds.rows.iter().any(|row| row.staleness.is_some());
    let mut head = vec![
        "strategy",
        "validation loss",
        "loss less ddp's",
        "MB a step, all ranks",
        "busiest rank",
        "seconds",
        "of ddp's",
        "less ddp's after as many seconds",
    ];
    head.extend(has_staleness.then_some("staleness, steps"));
    let mut table = Table::new(&head, 1);
    for row in &seeds.rows {
        let beside = seeds.to_reference(row);
        let over_seeds = |values: &[RunValue], text: &dyn Fn(&Interval) -> String| {
            interval(values, LEVEL).map_or(NONE.into(), |found| text(&ended(found, values.len())))
        };
        let (all, most) = row.sent.unzip();
        let mut cells = vec![
            row.name.clone(),
            over_seeds(&row.losses, &loss_text),
            beside.as_ref().map_or(NONE.into(), |beside| difference_text(&beside.loss)),
            maybe(all.map(|bytes| bytes / 1e6)),
            maybe(most.map(|bytes| bytes / 1e6)),
            over_seeds(&row.seconds, &super::text::interval),
            beside.as_ref().map_or(NONE.into(), |beside| match beside.time.ratio.has_ends() {
                true => beside.time.times(),
                false => format!("{:.2}×", beside.time.ratio.estimate),
            }),
            beside.and_then(|beside| beside.same_time).map_or(NONE.into(), |loss| difference_text(&loss)),
        ];
        if has_staleness {
            cells.push(row.staleness.map_or(NONE.into(), |stale| stale_text(&stale)));
        }
        table.row(cells);
    }
    table
}

/// The sentences and the table, for a page of the book.
pub(super) fn told_and_table(digest: &Digest<'_>) -> Option<(Vec<String>, Table)> {
    let seeds = Seeds::of(digest)?;
    Some((found(&seeds), table(&seeds)))
}

pub(super) fn write(page: &mut Page, digest: &Digest<'_>) {
    let Some(seeds) = Seeds::of(digest) else { return };
    page.section("seeds", "Loss, bytes, seconds", "What is learnt from the same tokens, and what does it take?");
    page.table(&table(&seeds));
    page.small(METHOD);
    let shares = distinct(seeds.rows.iter().filter_map(|row| row.case.crowd.clone()));
    shares.iter().for_each(|crowd| page.small(&format!("{crowd}: ranks also wait for the processor.")));
}

/// How the figures are to be read.
const METHOD: &str = "\
    Validation loss in nats a token after the last step; seconds from the beginning of the first step to the end of the last one. Brackets are the \
    interval of 95 % confidence over seeds (Student's). Rows are compared seed by seed: same weights at the beginning, same batches. A row pays if it takes \
    less time or has a lower loss and the other of the two was not found to be higher. It does not pay if it takes more time or has a higher loss and the \
    other was not found to be lower. It trades one for the other if both differ. A difference is found where its interval does not contain 0 (of times: \
    where that of the ratio does not contain 1); losses that are equal in three digits after the point count as equal. \
    After as many seconds: the mean training loss of a row's last 10 steps less that of the 10 steps that ddp had then made; ddp's learning rate is higher \
    then than at its end. Where each rank trains by itself, the training loss is that of rank 0's part of the batch.";

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use rig::record::{Record, Trained};
    use rig::results::Results;
    use rig::stats::made_up::record;

    use super::*;

    /// A run of `seed` that ends with this loss after so many seconds.
    fn run(strategy: &str, compress: Option<&str>, (seed, loss, seconds): (u64, f64, f64)) -> Record {
        let strategy = strategy.to_string();
        let compress = compress.map(String::from);
        let staleness = (strategy == "async-ps").then_some(2);
        let cell = Cell { strategy, compress, staleness, seed, link: "lan-100m".into(), steps: 8, ..Cell::default() };
        let mut record = record(cell, 1, &[]);
        let measured = record.measured.as_mut().unwrap();
        measured.seconds = (1..=8).map(|step| seconds * f64::from(step) / 8.0).collect();
        measured.losses = (0..8).map(|step| Some(5.0 - 0.1 * f64::from(step))).collect();
        measured.link.description = "lan-100m: 2 network namespaces, veth; up (100mbit), down (100mbit)".into();
        measured.trained = Some(Trained {
            step_ms: Some(1e3 * seconds / 8.0),
            validations: vec![(4, Some(9.0)), (8, Some(loss))],
            ..Trained::default()
        });
        if staleness.is_some() {
            measured.ranks[0].staleness = Some(Staleness { pushes: 4, sum: 5, max: 2 });
        }
        record
    }

    /// Losses and times of three seeds, by how much they are off those of the reference.
    fn planted() -> Vec<Record> {
        let seeds = [(1, 2.60, 100.0), (2, 2.64, 101.0), (3, 2.62, 99.0)];
        // Strategy, compression, loss above the reference's, spread over seeds of that and of seconds, share of the time.
        let rows = [
            ("ddp", None, 0.0, 0.0, 1.0),
            ("ddp", Some("int8"), 0.0, 0.001, 0.5),
            ("ddp", Some("powersgd:1"), 0.2, 0.001, 1.4),
            ("ps", None, 0.0, 0.0, 2.0),
            ("ps", Some("int8"), 0.0, 0.0, 1.5),
            ("diloco", None, 0.1, 0.001, 0.3),
            ("async-ps", None, 0.0, 0.5, 1.0),
        ];
        let of = |(strategy, compress, above, spread, share): (&'static str, Option<&'static str>, f64, f64, f64)| {
            seeds.map(|(seed, loss, seconds)| {
                let off = above + spread * (seed as f64 - 2.0);
                run(strategy, compress, (seed, loss + off, share * seconds + spread * (seed as f64 - 2.0)))
            })
        };
        rows.into_iter().flat_map(of).collect()
    }

    fn results(records: Vec<Record>) -> Results {
        Results { file: PathBuf::new(), records, warnings: Vec::new(), whole_bytes: 0 }
    }

    fn joined(text: &str) -> String {
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn what_pays_is_told_by_intervals_of_pairs() {
        let results = results(planted());
        let digest = Digest::of(&results, &[]);
        let said = sentences(&digest).unwrap();
        let expected = [
            "On lan-100m (100 Mbit/s) over tcp, ddp has after 4\u{202f}096 tokens (8 steps, 3 seeds) a validation loss of 2.620 [2.571, 2.670], \
             in 100.0 [97.55, 102.5] s; its ranks send 0.002 MB a step.",
            "Beside ddp, with the same tokens, these trade one for the other: diloco (0.30 times the time, loss +0.100; training \
             loss -0.300 beside it after as many seconds).",
            "Beside ddp, with the same tokens, these do not pay: ps (2.00 times the time, the same loss to three digits).",
            "Beside ddp, with the same tokens, no difference was found of these: async-ps (0.99 to 1.01 times the time, loss -1.242 to +1.242).",
            "Beside the same strategy without compression, with the same tokens, these pay: ddp int8 (0.50 times the time, loss -0.002 to +0.002); \
             ps int8 (0.75 times the time, the same loss to three digits).",
            "Beside the same strategy without compression, with the same tokens, these do not pay: ddp powersgd:1 (1.40 times the time, loss +0.200).",
        ];
        assert_eq!(said, expected);
    }

    #[test]
    fn the_tables_have_a_row_for_all_seeds_of_a_strategy_the_fastest_first() {
        let results = results(planted());
        let digest = Digest::of(&results, &[]);
        let text = text(&digest).unwrap();
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        let names: Vec<&str> = text.lines().skip(3).map(|line| line.split("  ").next().unwrap()).take(7).collect();
        assert_eq!(names, ["diloco", "ddp int8", "ddp", "async-ps", "ddp powersgd:1", "ps int8", "ps"]);
        let said = joined(&text);
        for part in ["diloco 2.720 +0.100 ±0.002 0.002 0.001 30.0", "Staleness in steps: async-ps 1.25 (at most 2)."] {
            assert!(said.contains(part), "`{part}` is not said: {text}");
        }
        let table = table(&Seeds::of(&digest).unwrap());
        assert_eq!((table.rows.len(), table.head.last().unwrap().as_str()), (7, "staleness, steps"));
        assert_eq!(table.rows[0][2], "+0.100 [+0.098, +0.102]");
        assert_eq!(table.rows[0][5..], ["30.00 [29.27, 30.75]", "0.30× [0.30, 0.30]", "-0.300 [-0.300, -0.300]", NONE]);
        let mut page = Page::default();
        write(&mut page, &digest);
        let html = page.finish("title");
        assert!(html.contains("id=\"seeds\"") && html.contains("2.720 [") && !html.contains("NaN"), "{html}");
        let screen = super::super::screen(&results, &[]);
        assert!(joined(&screen).contains("these pay: ddp int8") && !screen.contains("may be chance"), "{screen}");
    }

    #[test]
    fn of_two_seeds_nothing_is_claimed_and_of_one_there_is_no_table() {
        let of = |most: u64| {
            let mut records = planted();
            records.retain(|record| record.cell.seed <= most);
            results(records)
        };
        let two = of(2);
        let said = sentences(&Digest::of(&two, &[])).unwrap().join("\n");
        assert!(
            said.contains("Beside ddp, fewer than 3 seeds in common, so that nothing is claimed: diloco, "),
            "{said}"
        );
        assert!(!said.contains("pay") && !said.contains("trade") && !said.contains("NaN"), "{said}");
        let one = of(1);
        assert!(Seeds::of(&Digest::of(&one, &[])).is_none());
        assert!(Seeds::of(&Digest::of(&results(Vec::new()), &[])).is_none());
    }

    #[test]
    fn a_difference_is_never_printed_as_none() {
        assert_eq!(signed([0.1, -0.2]), ["+0.100", "-0.200"]);
        assert_eq!(signed([0.01, 0.000_04]), ["+0.01000", "+0.00004"]);
        assert_eq!(signed([0.0]), ["+0.000"]);
    }
}
