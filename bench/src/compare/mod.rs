//! `bench compare`: what changed between two sweeps, with how much of it chance explains.
//!
//! Cells are matched by all their axes. A cell got worse if the difference is significant *and* larger than a
//! threshold: either alone would cry wolf, the one over differences that do not matter, the other over noise.

mod changes;
mod exact;
mod findings;
mod render;

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

use gpt2::cli::say;
use rig::BenchError;
use rig::results::read_some_records;
use rig::stats::Metric;

use exact::Differences;
use findings::Findings;

/// Exit codes, for scripts.
const REGRESSION: u8 = 1;
const BAD_INPUT: u8 = 2;

/// Compares two sweeps, cell by cell.
///
/// Cells are matched by the values of all axes. Exit code: 0 if there is no regression; 1 if there is one (a cell became significantly worse by more
/// than --threshold, or has no figures any more); 2 if a sweep cannot be read or the two have no cell in common.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CompareArgs {
    /// The earlier sweep: its folder, or its results.jsonl.
    a: PathBuf,
    /// The later sweep.
    b: PathBuf,
    /// Smallest change that counts as a regression or an improvement: 5% or 0.05.
    #[arg(long, default_value = "5%")]
    threshold: Threshold,
    /// Metrics to compare, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "step")]
    metric: Vec<Metric>,
    /// Print the comparison as JSON.
    #[arg(long)]
    json: bool,
    /// Instead compare what does not depend on time: weights, losses, gradient norms, bytes and messages must be bit-identical. Exit code 1 if any
    /// differs or a cell is missing in B.
    #[arg(long, conflicts_with_all = ["threshold", "metric", "json"])]
    exact: bool,
}

/// A share, written as one or in percent.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Threshold(f64);

impl FromStr for Threshold {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, unit) = text.trim().strip_suffix('%').map_or((text, 1.0), |number| (number, 100.0));
        let share = number.trim().parse::<f64>().ok().map(|number| number / unit);
        // A bare 5 may be meant as 5 %, and as five times as much.
        share
            .filter(|share| (0.0..=1.0).contains(share))
            .map(Threshold)
            .ok_or_else(|| format!("{text} is not a share between 0 and 1; write 5% or 0.05"))
    }
}

/// Runs the command. Bad input is told here, since it has an exit code of its own.
///
/// # Errors
/// Output that cannot be made.
pub(crate) fn run(args: &CompareArgs) -> Result<ExitCode, BenchError> {
    if args.exact {
        return Ok(args.compare_exactly());
    }
    let compared = args.compare();
    match &compared {
        Ok(findings) if args.json => say(serde_json::to_string_pretty(findings)?),
        Ok(findings) => say(render::text(findings)),
        Err(error) => eprintln!("error: {error}"),
    }
    Ok(code(&compared))
}

fn code(compared: &Result<Findings, String>) -> ExitCode {
    match compared {
        Ok(findings) if findings.regressions == 0 => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(REGRESSION),
        Err(_) => ExitCode::from(BAD_INPUT),
    }
}

impl CompareArgs {
    fn compare_exactly(&self) -> ExitCode {
        let both = read_some_records(&self.a).and_then(|a| Ok((a, read_some_records(&self.b)?)));
        match both.and_then(|(a, b)| Differences::between(&a, &b)) {
            Ok(differences) => {
                say(&differences);
                if differences.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(REGRESSION) }
            }
            Err(error) => {
                eprintln!("error: {error}");
                ExitCode::from(BAD_INPUT)
            }
        }
    }

    fn compare(&self) -> Result<Findings, String> {
        let (a, b) = (read_some_records(&self.a)?, read_some_records(&self.b)?);
        Findings::of(&a, &b, &self.metric, self.threshold.0)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use clap::ValueEnum;

    use super::*;
    use rig::record::Record;
    use rig::results::Results;
    use rig::stats::made_up::{cell, record};

    /// A sweep of cells with these steps.
    fn sweep(folder: &Path, cells: &[(&str, f64)]) {
        let noise = |round: u32, step: u32| f64::from((round * 13 + step * 7) % 11) / 5.0;
        let one = |round: u32, &(strategy, ms): &(&str, f64)| -> Record {
            record(cell(strategy), round, &(0..20).map(|step| ms + noise(round, step)).collect::<Vec<_>>())
        };
        let records = (1..=5).flat_map(|round| cells.iter().map(move |made| one(round, made)));
        let lines: Vec<String> = records.map(|record| serde_json::to_string(&record).unwrap() + "\n").collect();
        fs::write(folder.join("results.jsonl"), lines.concat()).unwrap();
    }

    fn compare(a: &[(&str, f64)], b: &[(&str, f64)], more: &[&str]) -> (ExitCode, Result<Findings, String>) {
        let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        sweep(first.path(), a);
        sweep(second.path(), b);
        let compared = parse(first.path(), second.path(), more).compare();
        (code(&compared), compared)
    }

    fn parse(a: &Path, b: &Path, more: &[&str]) -> CompareArgs {
        #[derive(clap::Parser)]
        struct Whole {
            #[command(flatten)]
            args: CompareArgs,
        }
        let words = ["compare", a.to_str().unwrap(), b.to_str().unwrap()];
        <Whole as clap::Parser>::try_parse_from(words.iter().chain(more)).unwrap().args
    }

    #[test]
    fn the_same_twice_is_no_regression() {
        let (code, findings) = compare(&[("ddp", 40.0), ("ring", 50.0)], &[("ddp", 40.2), ("ring", 50.0)], &[]);
        assert_eq!(code, ExitCode::SUCCESS);
        let findings = findings.unwrap();
        assert_eq!((findings.regressions, findings.improvements), (0, 0));
        let text = render::text(&findings);
        assert!(text.contains("ddp tcp loopback") && text.contains("the same within 5 %"), "{text}");
    }

    #[test]
    fn a_cell_that_got_slower_is_a_regression_and_a_faster_one_an_improvement() {
        let (code, findings) = compare(&[("ddp", 40.0), ("ring", 50.0)], &[("ddp", 45.0), ("ring", 44.0)], &[]);
        assert_eq!(code, ExitCode::from(REGRESSION));
        let findings = findings.unwrap();
        assert_eq!((findings.regressions, findings.improvements), (1, 1));
        let text = render::text(&findings);
        assert!(text.contains("REGRESSION: slower by 5.0"), "{text}");
        assert!(text.contains("improvement: faster by 6.0"), "{text}");
    }

    #[test]
    fn a_threshold_and_other_metrics() {
        let (a, b) = ([("ddp", 40.0)], [("ddp", 45.0)]);
        let (code, findings) = compare(&a, &b, &["--threshold", "20%", "--metric", "step,tokens,exposed,bytes,loss"]);
        assert_eq!(code, ExitCode::SUCCESS);
        let findings = findings.unwrap();
        assert_eq!(findings.tables.len(), 5);
        assert!(render::text(&findings).contains("slower by 5.0"), "{}", render::text(&findings));
        let (code, _) = compare(&a, &b, &["--metric", "tokens"]);
        assert_eq!(code, ExitCode::from(REGRESSION));
        let (code, _) = compare(&a, &b, &["--metric", "bytes"]);
        assert_eq!(code, ExitCode::SUCCESS);
    }

    #[test]
    fn bad_input_has_a_code_of_its_own() {
        let (code, findings) = compare(&[("ddp", 40.0)], &[("ring", 40.0)], &[]);
        assert_eq!(code, ExitCode::from(BAD_INPUT));
        assert!(findings.unwrap_err().contains("have no cell in common"));
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(run(&parse(folder.path(), folder.path(), &[])).unwrap(), ExitCode::from(BAD_INPUT));
    }

    #[test]
    fn figures_that_make_no_sense_do_no_harm() {
        let odd = [f64::MAX, f64::MIN, -1.0, 0.0, 1e-320, f64::MAX, f64::NAN, f64::INFINITY];
        let results = |of: &dyn Fn(usize) -> Vec<f64>| {
            let records = (0..7).map(|round| {
                let mut made = record(cell("ddp"), round, &of(round as usize));
                // Columns of different lengths, and no ranks at all.
                let measured = made.measured.as_mut().unwrap();
                measured.ranks[0].steps.total.truncate(round as usize);
                measured.ranks[1].steps.exposed.truncate(2 * round as usize);
                if round == 6 {
                    measured.ranks.clear();
                }
                made
            });
            Results { file: PathBuf::new(), records: records.collect(), warnings: Vec::new(), whole_bytes: 0 }
        };
        let kinds: [&dyn Fn(usize) -> Vec<f64>; 4] = [
            &|round| vec![odd[round]; 9],
            &|round| odd.iter().cycle().skip(round).take(30).copied().collect(),
            &|round| vec![1.0; round],
            &|_| Vec::new(),
        ];
        for (a, b) in kinds.iter().flat_map(|a| kinds.iter().map(move |b| (a, b))) {
            let findings = Findings::of(&results(a), &results(b), Metric::value_variants(), 0.05).unwrap();
            assert!(!render::text(&findings).is_empty());
            assert!(serde_json::to_string(&findings).is_ok());
        }
    }

    #[test]
    fn thresholds() {
        for (text, share) in [("5%", 0.05), ("5 %", 0.05), ("0.05", 0.05), ("0", 0.0)] {
            assert_eq!(text.parse::<Threshold>().unwrap(), Threshold(share));
        }
        for odd in ["5", "-1%", "", "%", "nan", "inf", "x"] {
            assert!(odd.parse::<Threshold>().unwrap_err().contains("write 5% or 0.05"), "{odd}");
        }
    }
}
