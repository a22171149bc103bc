//! `bench predict`: what steps would take on a network, written down before any run; and how far off that was.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use gpt2::cli::say;
use gpt2::strategy::StrategyKind;
use isocomm::{Rung, TransportOptions};
use predict::calibration::Calibration;
use predict::chakra;
use predict::network::{Congestion, Processors};
use predict::prediction::{Assumed, Estimate, Prediction, Question, predict};
use predict::trace::Trace;
use rig::BenchError;
use rig::debug;
use rig::environment::Environment;
use rig::link::Profile;
use rig::record::{Axis, Cell, DEFAULT};
use rig::text;
use serde::{Deserialize, Serialize};

use super::against;
use super::cells::{CellOptions, MOST_RECORDED, Recorder};
use super::link::link;

/// Options by which `predict` and `advise` say what is predicted, and by what.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ForecastOptions {
    /// A plan whose cells are predicted, instead of those of the options: a TOML file, or the name of a plan that comes with this program.
    plan: Option<PathBuf>,
    #[command(flatten)]
    cells: CellOptions,
    /// The file that `bench calibrate` has written.
    #[arg(long, default_value = "calibration.json")]
    calibration: PathBuf,
    /// Simulate a machine of its own for each rank, with this many cores. [default: all ranks on this machine]
    #[arg(long)]
    apart: Option<f64>,
    /// Simulate processors that compute this many times as fast as this machine's.
    #[arg(long, default_value_t = 1.0)]
    speed: f64,
    /// Run although this is a debug build.
    #[arg(long)]
    allow_debug: bool,
}

/// Predicts step times from the measurements of `bench calibrate` and from each rank's computation, which is recorded here without a network.
///
/// Each prediction has bounds; beside it stands the estimate of a simple model that knows only latency and rate. Nine of ten measured steps are
/// expected to lie within the bounds, except in rows with *, which use something that was not measured; notes below the table say what. With
/// --against it compares predictions that were written earlier with the results of a sweep of the same cells.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct PredictArgs {
    #[command(flatten)]
    options: ForecastOptions,
    /// A Chakra execution trace to predict instead of a recording: the PREFIX of its files PREFIX.RANK.et, or a folder with the files of one trace.
    #[arg(long, conflicts_with = "plan")]
    trace: Option<PathBuf>,
    /// File for the predictions, with a line of JSON for each.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Folder of a sweep, with whose results the predictions that are already in --out are compared.
    #[arg(long, requires = "out", conflicts_with_all = ["plan", "trace"])]
    against: Option<PathBuf>,
}

impl ForecastOptions {
    /// The cells that are predicted, with the strategies `usual` where none are named.
    ///
    /// # Errors
    /// What cannot be, for the user.
    pub(super) fn cells(&self, usual: &[StrategyKind]) -> Result<Vec<Cell>, BenchError> {
        Ok(predicted(self.cells.cells(self.plan.as_deref(), usual)?)?)
    }

    /// What was calibrated.
    ///
    /// # Errors
    /// Nothing, or this is a debug build.
    pub(super) fn calibration(&self) -> Result<Calibration, BenchError> {
        debug::refuse_timings(self.allow_debug)?;
        calibration(&self.calibration)
    }

    /// Records each cell's ranks and predicts it.
    ///
    /// # Errors
    /// See [`forecast`](Self::forecast), and the text cannot be read.
    pub(super) fn recorded(&self, cells: &[Cell], calibration: &Calibration) -> Result<Vec<Forecast>, BenchError> {
        let mut recorder = Recorder::new(self.cells.text()?);
        self.forecast(cells, |cell| recorder.trace(cell), calibration)
    }

    /// Predicts each cell.
    ///
    /// # Errors
    /// A link or transport that is not known, or a trace that there cannot be.
    fn forecast(
        &self,
        cells: &[Cell],
        mut trace: impl FnMut(&Cell) -> Result<Trace, BenchError>,
        calibration: &Calibration,
    ) -> Result<Vec<Forecast>, BenchError> {
        let (apart, speed) = (self.apart, self.speed);
        if !(speed > 0.0 && speed.is_finite()) || apart.is_some_and(|cores| !(cores > 0.0 && cores.is_finite())) {
            return Err("--speed and --apart must be numbers above 0".into());
        }
        let processors = apart.map_or(calibration.shared_machine(), |cores| Processors::Own { cores });
        let processor = Environment::read().processor();
        let mut forecasts = Vec::with_capacity(cells.len());
        for cell in cells {
            let link = link(&cell.link, &Profile::find(&cell.link)?);
            let trace = trace(cell)?.with_compute_scaled(1.0 / speed);
            let question = Question {
                trace: &trace,
                transport: &cell.transport,
                link: &link,
                processors,
                threads: cell.threads as f64,
                congestion: congestion(cell)?,
                assumed: self.assumed(cell, calibration, &processor),
            };
            let prediction = predict(&question, calibration).map_err(|why| format!("{}: {why}", cell.strategy))?;
            forecasts.push(Forecast { cell: cell.clone(), prediction });
        }
        Ok(forecasts)
    }

    /// What of a cell on a machine with `processor` is otherwise than when it was calibrated and recorded.
    fn assumed(&self, cell: &Cell, calibration: &Calibration, processor: &str) -> Assumed {
        let mut assumed = Assumed::default();
        let computation = &mut assumed.computation;
        if (self.speed - 1.0).abs() > f64::EPSILON {
            computation.push(format!("computation is assumed to be {} times as fast as recorded", self.speed));
        }
        if let Some(cores) = self.apart {
            computation.push(format!(
                "each rank is assumed to have a machine with {cores} cores; all were measured on one machine"
            ));
        }
        if cell.threads != 1 {
            computation.push(format!("{} threads in each rank; computation was measured with 1", cell.threads));
        }
        if cell.strategy == OF_TRACE {
            computation
                .push("computation is taken from the trace; on what machine it was recorded is not known".into());
        } else if cell.ranks > MOST_RECORDED {
            computation.push(format!("{} ranks, of which two were recorded and stand for all", cell.ranks));
        }
        let communication = &mut assumed.communication;
        if !calibration.machine.starts_with(&format!("{processor},")) {
            communication.push(format!("this machine is {processor}; the calibration is of {}", calibration.machine));
        }
        let usual = TransportOptions::default();
        let mtu = cell.quic_mtu.map(|_| ("quic-mtu", cell.value(Axis::QuicMtu)));
        let congestion = (cell.congestion != DEFAULT).then(|| ("congestion", cell.congestion.clone()));
        let lanes = (cell.lanes != usual.lanes).then(|| ("lanes", cell.lanes.to_string()));
        for (axis, value) in [mtu, congestion, lanes].into_iter().flatten() {
            communication.push(format!("{axis} {value}, with which nothing was calibrated"));
        }
        assumed
    }
}

/// How the connections of a cell find their rate, where it says so.
///
/// # Errors
/// It names no transport.
fn congestion(cell: &Cell) -> Result<Option<Congestion>, BenchError> {
    let rung: Rung = cell.transport.parse()?;
    Ok((cell.congestion != DEFAULT).then(|| Congestion::of(&cell.congestion, rung.has_packets())))
}

/// The strategy of a cell whose trace is that of a file.
const OF_TRACE: &str = "trace";

/// A cell and what is predicted of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Forecast {
    pub(super) cell: Cell,
    pub(super) prediction: Prediction,
}

pub(crate) fn run(args: &PredictArgs) -> Result<ExitCode, BenchError> {
    if let (Some(results), Some(out)) = (&args.against, &args.out) {
        return against::run(out, results);
    }
    if let Some(out) = args.out.as_ref().filter(|out| out.exists()) {
        return Err(format!(
            "--out {} holds earlier predictions; give another file, or compare them with --against",
            out.display()
        )
        .into());
    }
    let options = &args.options;
    let calibration = options.calibration()?;
    let cells = options.cells(&[StrategyKind::Ddp])?;
    let forecasts = match &args.trace {
        Some(path) => {
            let trace = chakra::read(path)?;
            // A trace has its ranks and its strategy.
            let mut of_trace: Vec<Cell> = Vec::new();
            for cell in cells {
                let cell =
                    Cell { ranks: trace.ranks.len(), strategy: OF_TRACE.into(), preset: trace.name.clone(), ..cell };
                if !of_trace.contains(&cell) {
                    of_trace.push(cell);
                }
            }
            options.forecast(&of_trace, |_| Ok(trace.clone()), &calibration)?
        }
        None => options.recorded(&cells, &calibration)?,
    };
    say(format_args!("{}", table(&forecasts)));
    for line in notes(&forecasts) {
        say(format_args!("{line}"));
    }
    if let Some(out) = &args.out {
        let lines = forecasts.iter().map(serde_json::to_string).collect::<Result<Vec<_>, _>>()?;
        let text = lines.join("\n") + "\n";
        let written = std::fs::File::create_new(out).and_then(|mut file| file.write_all(text.as_bytes()));
        written.map_err(|error| format!("--out {}: {error}", out.display()))?;
        say(format_args!("{} predictions: {}", forecasts.len(), out.display()));
    }
    Ok(ExitCode::SUCCESS)
}

/// The cells that can be predicted; how many are left out is said.
///
/// # Errors
/// None is left.
fn predicted(mut cells: Vec<Cell>) -> Result<Vec<Cell>, String> {
    let all = cells.len();
    cells.retain(is_predicted);
    let left_out = all - cells.len();
    let what = "cells of one device, of transports without a network, and of PyTorch cannot be predicted";
    if cells.is_empty() {
        return Err(format!("there is nothing to predict: all {left_out} cells are left out; {what}"));
    }
    if left_out > 0 {
        say(format_args!("{left_out} of {all} cells are left out: {what}"));
    }
    Ok(cells)
}

/// Whether it goes over a network that is calibrated, by a trainer that is ours.
fn is_predicted(cell: &Cell) -> bool {
    let over_network = cell.transport.parse::<Rung>().is_ok_and(|rung| !rung.is_in_memory() && !rung.is_timing_only());
    over_network && cell.strategy != "single" && !cell.program.is_pytorch()
}

/// What `bench calibrate` has left in a file.
///
/// # Errors
/// There is none, or it is none.
fn calibration(path: &Path) -> Result<Calibration, BenchError> {
    let about = |why: &dyn std::fmt::Display| {
        format!("--calibration {}: {why}; `bench calibrate` writes this file", path.display())
    };
    let text = rig::folder::read_small(path).map_err(|why| about(&why))?;
    let calibration: Calibration = serde_json::from_str(&text).map_err(|error| about(&error))?;
    if calibration.schema != predict::calibration::SCHEMA {
        return Err(about(&"it was written by another version of this program").into());
    }
    Ok(calibration)
}

/// What was taken from elsewhere than measurements, each once.
fn outside(forecasts: &[Forecast]) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for line in forecasts.iter().flat_map(|forecast| &forecast.prediction.outside) {
        if !all.contains(line) {
            all.push(line.clone());
        }
    }
    all
}

fn table(forecasts: &[Forecast]) -> String {
    let axes: Vec<Axis> = Cell::varied(forecasts.iter().map(|forecast| &forecast.cell));
    let between =
        |estimate: &Estimate| format!("{:.1} ({:.1}-{:.1})", ms(estimate.value), ms(estimate.low), ms(estimate.high));
    let line = |Forecast { cell, prediction }: &Forecast| {
        let label = if axes.is_empty() { cell.strategy.clone() } else { cell.label(&axes) };
        [
            marked(label, prediction),
            between(&prediction.step),
            between(&prediction.exposed),
            format!("{:.0} %", 100.0 * prediction.utilization),
            format!("{:.2}", prediction.sent_bytes / 1e6),
            format!("{:.1}", ms(prediction.alpha_beta_s)),
        ]
    };
    let header = ["", "step (ms)", "waiting (ms)", "computing", "sent (MB)", "latency and rate alone (ms)"];
    text::columns(&header, &forecasts.iter().map(line).collect::<Vec<_>>(), 1)
}

/// A name, with a mark where the prediction rests on something that was not measured.
pub(super) fn marked(name: String, prediction: &Prediction) -> String {
    if prediction.outside.is_empty() { name } else { name + " *" }
}

/// What is printed below predictions: what was taken from elsewhere than measurements.
pub(super) fn notes(forecasts: &[Forecast]) -> Vec<String> {
    let outside = outside(forecasts);
    let mut notes: Vec<String> = outside.iter().map(|line| format!("note: {line}")).collect();
    if !notes.is_empty() {
        notes.push("* uses something that was not measured (see the notes); how many measured steps lie within its bounds is not known".into());
    }
    notes
}

pub(super) fn ms(seconds: f64) -> f64 {
    seconds * 1e3
}

#[cfg(test)]
mod tests {
    use rig::stats::made_up;

    use super::*;

    fn cell(strategy: &str, transport: &str) -> Cell {
        Cell { transport: transport.into(), ..made_up::cell(strategy) }
    }

    #[test]
    fn what_is_not_predicted_is_left_out_and_nothing_left_is_an_error() {
        let cells = vec![cell("ddp", "tcp"), cell("ddp", "shm"), cell("single", "tcp"), cell("ring", "quic")];
        let left: Vec<String> = predicted(cells.clone()).unwrap().into_iter().map(|cell| cell.strategy).collect();
        assert_eq!(left, ["ddp", "ring"]);
        let why = predicted(cells[1..3].to_vec()).unwrap_err();
        assert!(why.contains("all 2 cells are left out"), "{why}");
    }

    #[test]
    fn what_was_not_calibrated_is_a_reason_for_a_mark() {
        #[derive(clap::Parser)]
        struct Parsed {
            #[command(flatten)]
            options: ForecastOptions,
        }
        let options = |words: &[&str]| <Parsed as clap::Parser>::parse_from([&["bench"], words].concat()).options;
        let calibration = Calibration {
            schema: 1,
            machine: "Fast 9000, 2 cores, 8 GB, Linux".into(),
            cores: 2,
            effective_cores: 2.0,
            compute_spread: 0.02,
            sharing_spread: None,
            paths: Vec::new(),
        };
        let usual = Cell { threads: 1, lanes: TransportOptions::default().lanes, ..cell("ddp", "tcp") };
        let processor = "Fast 9000, 2 cores";
        let reasons = |words: &[&str], cell: &Cell, processor: &str| {
            let Assumed { computation, communication } = options(words).assumed(cell, &calibration, processor);
            (computation.len(), communication.len())
        };
        assert_eq!(reasons(&[], &usual, processor), (0, 0));
        assert_eq!(reasons(&["--speed", "2"], &usual, processor), (1, 0));
        assert_eq!(reasons(&["--apart", "4"], &usual, processor), (1, 0));
        assert_eq!(reasons(&[], &usual, "Fast 9000, 24 cores"), (0, 1));
        let computed = [
            Cell { threads: 2, ..usual.clone() },
            Cell { ranks: 9, ..usual.clone() },
            Cell { strategy: OF_TRACE.into(), ..usual.clone() },
        ];
        computed.iter().for_each(|cell| assert_eq!(reasons(&[], cell, processor), (1, 0), "{cell:?}"));
        let communicated = [
            Cell { congestion: "bbr".into(), ..usual.clone() },
            Cell { lanes: usual.lanes + 1, ..usual.clone() },
            Cell { quic_mtu: Some(1452), ..usual },
        ];
        communicated.iter().for_each(|cell| assert_eq!(reasons(&[], cell, processor), (0, 1), "{cell:?}"));
    }
}
