//! Predictions that were written down before, beside what a sweep then measured.

use std::path::Path;
use std::process::ExitCode;

use gpt2::cli::say;
use predict::prediction::Estimate;
use rig::BenchError;
use rig::plot::{self, Curve, Labels, Point, Scale};
use rig::record::{Axis, Cell, Record};
use rig::results::read_some_records;
use rig::stats::median;
use rig::text;
use rig::training::sound;
use serde::{Deserialize, Serialize};

use super::forecast::{Forecast, ms};

/// The first steps, which are not as the others are.
const WARM_UP: usize = 2;

/// The part of a step from which on waiting is judged by itself.
const MUCH: f64 = 0.3;

/// A cell: what was predicted and what was measured, in seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Pair {
    cell: Cell,
    step: Estimate,
    exposed: Estimate,
    alpha_beta_s: f64,
    measured_step: f64,
    measured_exposed: f64,
    /// Whether the prediction rests on something that was not measured.
    marked: bool,
}

/// Predictions beside what was measured.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Comparison {
    pairs: Vec<Pair>,
    /// Cells without a sound run.
    unmeasured: Vec<String>,
}

/// What the predictions of a folder of results are called there.
pub(crate) const PREDICTIONS: &str = "predictions.jsonl";

pub(super) fn run(predictions: &Path, results: &Path) -> Result<ExitCode, BenchError> {
    let read = read_some_records(results)?;
    let comparison = Comparison::of(predictions, &read.records)?;
    if comparison.pairs.is_empty() {
        return Err(format!("no cell of {} has a good run in {}", predictions.display(), results.display()).into());
    }
    say(format_args!("{}", table(&comparison.pairs)));
    for sentence in comparison.sentences() {
        say(format_args!("{sentence}"));
    }
    keep(predictions, &read.file)?;
    Ok(ExitCode::SUCCESS)
}

/// Puts predictions beside the results that they are compared with, where the report finds them.
fn keep(predictions: &Path, results: &Path) -> Result<(), String> {
    let kept = results.with_file_name(PREDICTIONS);
    if kept.canonicalize().ok() == predictions.canonicalize().ok() {
        return Ok(());
    }
    let copied = std::fs::copy(predictions, &kept).map_err(|error| format!("{}: {error}", kept.display()))?;
    say(format_args!("{}: {copied} bytes, for bench report", kept.display()));
    Ok(())
}

impl Comparison {
    /// Predictions of a file beside the records of their cells.
    ///
    /// # Errors
    /// It cannot be read, or has something else.
    pub(crate) fn of(predictions: &Path, records: &[Record]) -> Result<Self, String> {
        let text =
            std::fs::read_to_string(predictions).map_err(|error| format!("{}: {error}", predictions.display()))?;
        let line = |(number, line): (usize, &str)| {
            let wrong = |error: serde_json::Error| format!("{}, line {}: {error}", predictions.display(), number + 1);
            serde_json::from_str::<Forecast>(line).map_err(wrong)
        };
        let forecasts = text.lines().enumerate().map(line).collect::<Result<Vec<_>, _>>()?;
        let (pairs, unmeasured) = pairs(&forecasts, records);
        Ok(Comparison { pairs, unmeasured })
    }

    /// What it comes to.
    pub(crate) fn sentences(&self) -> Vec<String> {
        let mut sentences = sentences(&self.pairs);
        if !self.unmeasured.is_empty() {
            sentences.push(format!(
                "left out, because there is no good run: {} of {} cells: {}",
                self.unmeasured.len(),
                self.unmeasured.len() + self.pairs.len(),
                self.unmeasured.join("; ")
            ));
        }
        sentences
    }

    /// A mark for each cell: its predicted step over its measured one.
    ///
    /// # Errors
    /// There is nothing to draw.
    pub(crate) fn picture(&self) -> Result<String, String> {
        let of_pair = |pair: &Pair| Point {
            x: ms(pair.measured_step),
            y: ms(pair.step.value),
            interval: Some((ms(pair.step.low), ms(pair.step.high))),
        };
        let (low, high) = self.pairs.iter().fold((f64::INFINITY, 0.0_f64), |(low, high), pair| {
            (low.min(ms(pair.measured_step)), high.max(ms(pair.measured_step)))
        });
        let diagonal = [low, high].map(|at| Point { x: at, y: at, interval: None });
        let marks = |name: &str, points: Vec<Point>, colour: usize| Curve {
            name: name.into(),
            points,
            colour,
            dashed: false,
            width: 0.0,
            mark: Some(colour),
        };
        let mut curves = vec![Curve {
            name: "as measured".into(),
            points: diagonal.to_vec(),
            colour: 0,
            dashed: true,
            width: 1.0,
            mark: None,
        }];
        let mut transports: Vec<&str> = self.pairs.iter().map(|pair| pair.cell.transport.as_str()).collect();
        transports.sort_unstable();
        transports.dedup();
        for (number, transport) in transports.iter().enumerate() {
            let of_transport = self.pairs.iter().filter(|pair| pair.cell.transport == *transport);
            curves.push(marks(transport, of_transport.map(of_pair).collect(), number + 1));
        }
        let plain = |pair: &Pair| Point { x: ms(pair.measured_step), y: ms(pair.alpha_beta_s), interval: None };
        curves.push(marks("latency and rate alone", self.pairs.iter().map(plain).collect(), transports.len() + 1));
        let labels = Labels { title: TITLE, x: "measured (ms a step)", y: "predicted (ms a step)" };
        plot::curves(&labels, &curves, Scale { log_x: true, log_y: true, ..Scale::default() })
    }
}

/// Of the picture.
pub(crate) const TITLE: &str = "Steps: predicted and measured";

/// The forecasts that have sound runs beside them, and the cells of those that have none.
fn pairs(forecasts: &[Forecast], records: &[Record]) -> (Vec<Pair>, Vec<String>) {
    let axes = Cell::varied(forecasts.iter().map(|forecast| &forecast.cell));
    let (mut pairs, mut unmeasured) = (Vec::new(), Vec::new());
    for forecast in forecasts {
        match pair(forecast, records) {
            Some(pair) => pairs.push(pair),
            None if axes.is_empty() => unmeasured.push(forecast.cell.strategy.clone()),
            None => unmeasured.push(forecast.cell.label(&axes)),
        }
    }
    (pairs, unmeasured)
}

/// A forecast beside the runs of its cell.
fn pair(forecast: &Forecast, records: &[Record]) -> Option<Pair> {
    let runs = records.iter().filter(|record| record.cell == forecast.cell);
    let of_runs: Vec<(f64, f64)> = runs.filter_map(measured).collect();
    let middle = |of: fn(&(f64, f64)) -> f64| median(&of_runs.iter().map(of).collect::<Vec<_>>());
    Some(Pair {
        cell: forecast.cell.clone(),
        step: forecast.prediction.step,
        exposed: forecast.prediction.exposed,
        alpha_beta_s: forecast.prediction.alpha_beta_s,
        measured_step: middle(|(step, _)| *step)?,
        measured_exposed: middle(|(_, exposed)| *exposed)?,
        marked: !forecast.prediction.outside.is_empty(),
    })
}

/// Seconds of a step of a run, and of waiting in one, on the rank where that is longest.
fn measured(record: &Record) -> Option<(f64, f64)> {
    let ranks = &sound(record).ok()?.ranks;
    let period = record.cell.period();
    let typical = |columns: &[&[f64]]| -> Option<f64> {
        let length = columns.iter().map(|column| column.len()).min()?;
        let sums: Vec<f64> = (WARM_UP..length).map(|step| columns.iter().map(|column| column[step]).sum()).collect();
        // Whole periods, as a mean of each.
        let means: Vec<f64> =
            sums.rchunks_exact(period).map(|steps| steps.iter().sum::<f64>() / period as f64).collect();
        median(&means)
    };
    let of_ranks = |columns: &dyn Fn(&rig::record::Steps) -> Option<f64>| {
        ranks.iter().filter_map(|rank| columns(&rank.steps)).max_by(f64::total_cmp)
    };
    let step = of_ranks(&|steps| typical(&[&steps.total]))?;
    let exposed = of_ranks(&|steps| typical(&[&steps.exposed, &steps.scalars, &steps.skew]))?;
    Some((step / 1e3, exposed / 1e3))
}

/// By how much a prediction is too long, as a share of what was measured.
fn off(predicted: f64, measured: f64) -> f64 {
    predicted / measured - 1.0
}

impl Pair {
    fn waits_much(&self) -> bool {
        self.measured_exposed >= MUCH * self.measured_step
    }
}

fn table(pairs: &[Pair]) -> String {
    let axes: Vec<Axis> = Cell::varied(pairs.iter().map(|pair| &pair.cell));
    let signed = |share: f64| format!("{:+.1} %", 100.0 * share);
    let line = |pair: &Pair| {
        [
            if axes.is_empty() { pair.cell.strategy.clone() } else { pair.cell.label(&axes) }
                + if pair.marked { " *" } else { "" },
            format!("{:.1}", ms(pair.measured_step)),
            format!("{:.1}", ms(pair.step.value)),
            signed(off(pair.step.value, pair.measured_step)),
            if pair.step.covers(pair.measured_step) { "yes" } else { "no" }.into(),
            format!("{:.1}", ms(pair.measured_exposed)),
            format!("{:.1}", ms(pair.exposed.value)),
            if pair.waits_much() { signed(off(pair.exposed.value, pair.measured_exposed)) } else { "-".into() },
            signed(off(pair.alpha_beta_s, pair.measured_step)),
        ]
    };
    let header =
        ["", "step (ms)", "predicted", "off", "within", "waiting (ms)", "predicted", "off", "latency and rate alone"];
    text::columns(&header, &pairs.iter().map(line).collect::<Vec<_>>(), 1)
}

/// What the table comes to.
fn sentences(pairs: &[Pair]) -> Vec<String> {
    let share = |share: f64| format!("{:.1} %", 100.0 * share);
    let summary = |what: &str, errors: Vec<f64>| {
        let sizes: Vec<f64> = errors.iter().map(|error| error.abs()).collect();
        let [middle, nine, worst] = [0.5, 0.9, 1.0].map(|part| quantile(&sizes, part));
        format!(
            "error of {what}: {} in the median, at most {} in nine of ten cells, {} in the worst ({} cells)",
            share(middle),
            share(nine),
            share(worst),
            sizes.len()
        )
    };
    let step = |pair: &Pair| off(pair.step.value, pair.measured_step);
    let mut sentences = vec![summary("the step time", pairs.iter().map(step).collect())];
    let much: Vec<&Pair> = pairs.iter().filter(|pair| pair.waits_much()).collect();
    if !much.is_empty() {
        let errors = much.iter().map(|pair| off(pair.exposed.value, pair.measured_exposed)).collect();
        sentences.push(summary("the waiting time, where it is at least 30 % of a step", errors));
    }
    let plain = pairs.iter().map(|pair| off(pair.alpha_beta_s, pair.measured_step)).collect();
    sentences.push(summary("the step time by latency and rate alone", plain));
    for (marked, meant) in
        [(false, "as nine of ten should"), (true, "in rows with *, which use something that was not measured")]
    {
        let steps = || pairs.iter().filter(|pair| pair.marked == marked);
        let within = steps().filter(|pair| pair.step.covers(pair.measured_step)).count();
        if steps().count() > 0 {
            sentences.push(format!("{within} of {} measured steps lie within their bounds, {meant}", steps().count()));
        }
    }
    sentences.extend(by_axis(pairs));
    if let Some(worst) = pairs.iter().max_by(|a, b| step(a).abs().total_cmp(&step(b).abs())) {
        let Cell { strategy, transport, link, ranks, .. } = &worst.cell;
        sentences.push(format!(
            "the worst cell is {strategy} over {transport} on {link} with {ranks} ranks: predicted {:.1} ms, of which {:.1} waiting; measured {:.1}, of which \
             {:.1} waiting",
            ms(worst.step.value),
            ms(worst.exposed.value),
            ms(worst.measured_step),
            ms(worst.measured_exposed)
        ));
    }
    sentences
}

/// How far off steps are in the median, for each value of each axis that has several.
fn by_axis(pairs: &[Pair]) -> Vec<String> {
    let of_axis = |axis: &Axis| {
        let mut values: Vec<(String, Vec<f64>)> = Vec::new();
        for pair in pairs {
            let (value, error) = (pair.cell.value(*axis), off(pair.step.value, pair.measured_step).abs());
            match values.iter_mut().find(|(known, _)| *known == value) {
                Some((_, errors)) => errors.push(error),
                None => values.push((value, vec![error])),
            }
        }
        let values = values.iter().map(|(value, errors)| format!("{value} {:.1} %", 100.0 * quantile(errors, 0.5)));
        format!("a step by {axis}, in the median: {}", values.collect::<Vec<_>>().join(", "))
    };
    Cell::varied(pairs.iter().map(|pair| &pair.cell)).iter().map(of_axis).collect()
}

/// The least value that at least this part of the values does not exceed.
fn quantile(values: &[f64], part: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(place.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use rig::stats::made_up;

    use super::*;

    fn estimate(value: f64) -> Estimate {
        Estimate { value, low: 0.9 * value, high: 1.1 * value }
    }

    fn pair_of(predicted: f64, measured: f64) -> Pair {
        Pair {
            cell: made_up::cell("ddp"),
            step: estimate(predicted),
            exposed: estimate(predicted / 2.0),
            alpha_beta_s: 2.0 * measured,
            measured_step: measured,
            measured_exposed: measured / 2.0,
            marked: false,
        }
    }

    #[test]
    fn errors_are_counted_as_they_are() {
        let mut pairs = [pair_of(0.105, 0.1), pair_of(0.09, 0.1), pair_of(0.13, 0.1)];
        let text = sentences(&pairs).join("\n");
        assert!(
            text.contains("error of the step time: 10.0 % in the median, at most 30.0 % in nine of ten cells, 30.0 % in the worst (3 cells)"),
            "{text}"
        );
        assert!(text.contains("latency and rate alone: 100.0 % in the median"), "{text}");
        assert!(text.contains("1 of 3 measured steps lie within"), "{text}");
        assert!(text.contains("predicted 130.0 ms, of which 65.0 waiting; measured 100.0, of which 50.0"), "{text}");
        assert!(table(&pairs).contains("+30.0 %"), "{}", table(&pairs));
        pairs[2].marked = true;
        let text = sentences(&pairs).join("\n");
        assert!(text.contains("1 of 2 measured steps lie") && text.contains("0 of 1 measured steps lie"), "{text}");
        assert!(table(&pairs).contains("ddp *"), "{}", table(&pairs));
    }

    #[test]
    fn the_picture_has_a_mark_for_each_transport_and_for_the_plain_model() {
        let mut pairs = vec![pair_of(0.105, 0.1), pair_of(0.2, 0.19)];
        pairs[1].cell.transport = "quic".into();
        let text = sentences(&pairs).join("\n");
        assert!(text.contains("a step by transport, in the median: ") && text.contains("quic 5.3 %"), "{text}");
        let svg = Comparison { pairs, unmeasured: Vec::new() }.picture().unwrap();
        for part in [TITLE, "quic", "latency and rate alone", "as measured"] {
            assert!(svg.contains(part), "{part}");
        }
        assert!(Comparison { pairs: Vec::new(), unmeasured: Vec::new() }.picture().is_err());
    }

    fn record_of(strategy: &str) -> Record {
        let mut record = made_up::record(made_up::cell(strategy), 1, &[900.0, 900.0, 10.0, 12.0, 11.0]);
        for rank in record.measured.iter_mut().flat_map(|measured| &mut measured.ranks) {
            let steps = &mut rank.steps;
            (steps.exposed, steps.scalars, steps.skew) = (vec![4.0; 5], vec![1.0; 5], vec![0.5; 5]);
        }
        record
    }

    #[test]
    fn a_step_is_the_median_of_the_slowest_rank_after_the_first_two() {
        let (step, exposed) = measured(&record_of("ddp")).unwrap();
        assert!((step - 0.011).abs() < 1e-9 && (exposed - 0.0055).abs() < 1e-9, "{step}, {exposed}");
    }

    #[test]
    fn cells_without_a_sound_run_are_named() {
        let prediction = |strategy: &str| Forecast {
            cell: made_up::cell(strategy),
            prediction: predict::prediction::Prediction {
                step: estimate(0.01),
                exposed: estimate(0.005),
                utilization: 0.5,
                sent_bytes: 1.0,
                alpha_beta_s: 0.01,
                limit: predict::prediction::Limit::Compute,
                outside: Vec::new(),
            },
        };
        let forecasts = [prediction("ddp"), prediction("ring"), prediction("ps")];
        let (pairs, unmeasured) = pairs(&forecasts, &[record_of("ddp")]);
        assert_eq!((pairs.len(), unmeasured), (1, vec!["ring".to_string(), "ps".to_string()]));
    }
}
