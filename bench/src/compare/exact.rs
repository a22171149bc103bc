//! What two sweeps must have in common to the last bit, whatever the time they took: results, and what was sent for them.

use std::collections::BTreeMap;
use std::fmt;

use rig::record::{Axis, Cell, Measured, Rank, Record, Status};
use rig::results::Results;

/// Most differences that are printed.
const SHOWN: usize = 40;

/// Where the numbers of two sweeps differ.
#[derive(Debug)]
pub(crate) struct Differences {
    /// Runs of the first sweep that have a partner in the second.
    compared: usize,
    /// Runs that neither sweep could make on its machine.
    unavailable: usize,
    /// One line for each: the cell, what differs, and both values.
    lines: Vec<String>,
}

impl Differences {
    /// Compares the runs of `a` with those of the same cell and round of `b`.
    ///
    /// # Errors
    /// The sweeps have no run in common.
    pub(crate) fn between(a: &Results, b: &Results) -> Result<Differences, String> {
        let axes: Vec<Axis> = {
            let varied = Cell::varied(a.records.iter().chain(&b.records).map(|record| &record.cell));
            let main = [Axis::Strategy, Axis::Transport, Axis::Ranks];
            Axis::ALL.into_iter().filter(|axis| main.contains(axis) || varied.contains(axis)).collect()
        };
        // Of a run that was made again, the last counts.
        let partners: BTreeMap<(&Cell, u32), &Record> =
            b.records.iter().map(|record| ((&record.cell, record.round), record)).collect();
        let firsts: BTreeMap<(&Cell, u32), &Record> =
            a.records.iter().map(|record| ((&record.cell, record.round), record)).collect();
        let mut differences = Differences { compared: 0, unavailable: 0, lines: Vec::new() };
        for (key, first) in &firsts {
            let label = format!("{} (round {})", first.cell.label(&axes), first.round);
            match partners.get(key) {
                Some(second) => differences.compare(&label, first, second),
                None => differences.lines.push(format!("{label}: missing in {}", b.file.display())),
            }
        }
        if differences.compared == 0 && differences.unavailable == 0 {
            return Err(format!(
                "{} and {} have no run in common: no combination of axis values occurs in both; compare sweeps of the same plan",
                a.file.display(),
                b.file.display()
            ));
        }
        Ok(differences)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    fn compare(&mut self, label: &str, first: &Record, second: &Record) {
        if matches!((&first.status, &second.status), (Status::NotAvailable(_), Status::NotAvailable(_))) {
            self.unavailable += 1;
            return;
        }
        self.compared += 1;
        if first.status != Status::Ok || second.status != Status::Ok {
            self.lines.push(format!("{label}: status {:?} and {:?}", first.status, second.status));
        } else if let (Some(one), Some(other)) = (&first.measured, &second.measured) {
            let figures =
                |measured: &Measured| if first.cell.is_repeatable() { figures(measured) } else { sizes(measured) };
            let (one, other) = (figures(one), figures(other));
            let values = one.iter().zip(&other).filter(|(one, other)| one != other);
            self.lines.extend(values.map(|((name, one), (_, other))| format!("{label}: {name}: {one} and {other}")));
            if one.len() != other.len() {
                self.lines.push(format!("{label}: {} and {} figures", one.len(), other.len()));
            }
        }
    }
}

/// By name, all figures of a run that do not depend on time.
fn figures(measured: &Measured) -> Vec<(String, String)> {
    // The shortest text that is read back as the same number.
    let steps = |name: &str, values: &[Option<f64>]| {
        let one = |(step, value): (usize, &Option<f64>)| (format!("{name} of step {}", step + 1), format!("{value:?}"));
        values.iter().enumerate().map(one).collect::<Vec<_>>()
    };
    let mut all = vec![("weights".to_string(), measured.weights_hash.clone())];
    all.extend(sizes(measured));
    all.extend(steps("loss", &measured.losses));
    all.extend(steps("gradient norm", &measured.grad_norms));
    all.extend(measured.ranks.iter().flat_map(traffic));
    all
}

/// The same of a run whose numbers depend on time.
fn sizes(measured: &Measured) -> Vec<(String, String)> {
    vec![
        ("tokens a step".into(), measured.tokens_per_step.to_string()),
        ("parameters".into(), measured.parameters.to_string()),
    ]
}

fn traffic(rank: &Rank) -> Vec<(String, String)> {
    let figures = [
        ("payload bytes", rank.payload_bytes),
        ("payload bytes by formula", Some(rank.payload_expected)),
        ("messages", rank.messages),
        ("messages by formula", Some(rank.messages_expected)),
        ("bytes of scalars", rank.scalar_bytes),
        ("bytes of headers", rank.framing_bytes),
    ];
    let one = |(name, value): (&str, Option<u64>)| (format!("{name} of rank {}", rank.rank), format!("{value:?}"));
    figures.into_iter().map(one).collect()
}

impl fmt::Display for Differences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lines.iter().take(SHOWN).try_for_each(|line| writeln!(f, "{line}"))?;
        if let more @ 1.. = self.lines.len().saturating_sub(SHOWN) {
            writeln!(f, "… and {more} more")?;
        }
        if self.unavailable > 0 {
            writeln!(f, "{} runs were not possible on either machine", self.unavailable)?;
        }
        let Differences { compared, lines, .. } = self;
        match lines.len() {
            0 => {
                write!(f, "{compared} runs compared: weights, losses, gradient norms, bytes and messages are the same")
            }
            count => write!(f, "{compared} runs compared: {count} differences"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use rig::stats::made_up::{cell, record};

    fn sweep(change: impl Fn(&mut Record)) -> Results {
        let one = |strategy: &str| {
            let mut made = record(cell(strategy), 1, &[4.0, 5.0]);
            if let Some(measured) = &mut made.measured {
                measured.grad_norms = vec![Some(1.0), None];
            }
            change(&mut made);
            made
        };
        let records = ["ddp", "ring"].map(one).to_vec();
        Results { file: PathBuf::from("x"), records, warnings: Vec::new(), whole_bytes: 0 }
    }

    fn lines(change: impl Fn(&mut Measured)) -> Vec<String> {
        let changed = sweep(|record| {
            if record.cell.strategy == "ring" {
                record.measured.as_mut().into_iter().for_each(&change);
            }
        });
        Differences::between(&sweep(|_| ()), &changed).unwrap().lines
    }

    #[test]
    fn times_are_no_difference() {
        let slower = sweep(|record| {
            let measured = record.measured.as_mut().unwrap();
            measured.seconds = vec![9.0];
            measured.ranks[0].steps.total = vec![9.0];
        });
        let differences = Differences::between(&sweep(|_| ()), &slower).unwrap();
        assert!(differences.is_empty());
        assert!(differences.to_string().starts_with("2 runs compared: weights"), "{differences}");
    }

    #[test]
    fn every_number_counts_to_the_last_bit() {
        type Change<'a> = &'a dyn Fn(&mut Measured);
        let next = f64::from_bits(3.5_f64.to_bits() + 1);
        let cases: [(&str, Change<'_>); 9] = [
            ("weights: abc and abd", &|measured| measured.weights_hash = "abd".into()),
            ("loss of step 2: Some(3.5) and Some(3.5000000000000004)", &|measured| measured.losses[1] = Some(next)),
            ("gradient norm of step 2: None and Some(3.5)", &|measured| measured.grad_norms[1] = Some(3.5)),
            ("loss of step 2", &|measured| measured.losses.truncate(1)),
            ("payload bytes of rank 1", &|measured| measured.ranks[1].payload_bytes = None),
            ("payload bytes by formula of rank 0", &|measured| measured.ranks[0].payload_expected += 1),
            ("messages of rank 0", &|measured| measured.ranks[0].messages = Some(1)),
            ("bytes of headers of rank 0", &|measured| measured.ranks[0].framing_bytes = Some(64)),
            ("figures", &|measured| measured.ranks.truncate(1)),
        ];
        for (expected, change) in cases {
            let lines = lines(change);
            assert!(
                lines.iter().any(|line| line.starts_with("ring") && line.contains(expected)),
                "{expected}: {lines:?}"
            );
        }
    }

    #[test]
    fn runs_that_failed_or_are_missing_are_differences() {
        let failed = sweep(|record| record.status = Status::Failed("why".into()));
        assert_eq!(Differences::between(&failed, &failed).unwrap().lines.len(), 2);
        let absent = sweep(|record| record.status = Status::NotAvailable("no GPU".into()));
        assert!(Differences::between(&absent, &absent).unwrap().is_empty());
        assert_eq!(Differences::between(&absent, &sweep(|_| ())).unwrap().lines.len(), 2);
        let mut one = sweep(|_| ());
        one.records.pop();
        assert_eq!(Differences::between(&sweep(|_| ()), &one).unwrap().lines.len(), 1);
        assert!(Differences::between(&one, &sweep(|record| record.cell.seed = 9)).is_err());
    }
}
