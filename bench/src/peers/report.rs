//! Rows of `bench peers`, and the table over its rounds.

use std::fmt;

use gpt2::config::ModelConfig;
use gpt2::strategy::StrategyKind;
use isocomm::TransportKind;
use rig::environment::Environment;
use rig::link::Probe;
use rig::record::{Record, Trainer};
use rig::stats::Ratio;
use rig::text::{columns, middle, ratio, spread};
use rig::training::Figures;
use serde::{Serialize, Serializer};

/// Who trains, and by which strategy; `None` for no communication.
pub(super) type Cell = (Side, Option<StrategyKind>);

/// Who trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// PyTorch, over Gloo where it communicates.
    Torch,
    /// We, without communication.
    Alone,
    /// We, over a transport.
    Ours(TransportKind),
}

/// What a job came to: medians over its steps.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Outcome {
    /// Of the slowest rank.
    pub(super) step_ms: f64,
    /// Of all ranks together.
    pub(super) tokens_per_s: f64,
    /// How long a step waits for gradients and parameters, as the trainer itself measures; PyTorch's does not.
    pub(super) waiting_ms: Option<f64>,
    /// How long it waits for loss and norm, likewise.
    pub(super) scalars_ms: Option<f64>,
    pub(super) first_loss: f64,
    pub(super) final_loss: f64,
    pub(super) payload_bytes: Option<u64>,
}

/// One job of one round: a line of `peers.jsonl`.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) round: u32,
    pub(super) side: Side,
    /// `None` for no communication.
    pub(super) strategy: Option<StrategyKind>,
    /// PyTorch's version, where it is PyTorch.
    pub(super) torch: Option<String>,
    pub(super) network: String,
    pub(super) probe: Option<Probe>,
    pub(super) ranks: usize,
    pub(super) threads_per_rank: usize,
    pub(super) model: ModelConfig,
    pub(super) global_batch: usize,
    /// The first two count for nothing.
    pub(super) steps: u64,
    /// `ok`, or why there are no figures.
    pub(super) status: String,
    #[serde(flatten)]
    pub(super) outcome: Option<Outcome>,
    pub(super) environment: Environment,
}

impl Row {
    /// The line of a record of a run that trained `model`.
    ///
    /// # Errors
    /// Its cell names what there is not.
    pub(super) fn of(record: &Record, model: &ModelConfig, torch: Option<&str>) -> Result<Self, String> {
        let cell = &record.cell;
        let side = match cell.program {
            Trainer::Pytorch | Trainer::PytorchCompiled => Side::Torch,
            Trainer::Ours if cell.alone => Side::Alone,
            Trainer::Ours => Side::Ours(TransportKind::find(&cell.transport)?),
        };
        let communicates = matches!(side, Side::Ours(_));
        let figures = Figures::of(record);
        let link = record.measured.as_ref().map(|measured| measured.link.clone()).unwrap_or_default();
        Ok(Row {
            round: record.round,
            side,
            strategy: if cell.alone { None } else { Some(cell.strategy.parse()?) },
            torch: torch.filter(|_| side == Side::Torch).map(String::from),
            network: link.description,
            probe: link.probe,
            ranks: cell.ranks,
            threads_per_rank: cell.threads,
            model: model.clone(),
            global_batch: cell.batch,
            steps: cell.steps,
            status: figures.as_ref().err().cloned().unwrap_or_else(|| "ok".into()),
            outcome: figures.ok().map(|figures| Outcome {
                step_ms: figures.step_ms,
                tokens_per_s: figures.tokens_per_s,
                waiting_ms: communicates.then_some(figures.exposed_ms),
                scalars_ms: communicates.then_some(figures.scalars_ms),
                first_loss: figures.first_loss,
                final_loss: figures.final_loss,
                payload_bytes: figures.payload_bytes,
            }),
            environment: record.environment.clone(),
        })
    }
}

/// Round by round: first both sides without communication, then each strategy, PyTorch's beside ours.
pub(super) fn sort(rows: &mut [Row], strategies: &[StrategyKind]) {
    rows.sort_by_key(|row| {
        let place = row.strategy.map(|strategy| strategies.iter().position(|known| *known == strategy));
        (row.round, place, row.side != Side::Torch)
    });
}

/// All rounds of all cells, in the order of their rows.
pub(super) struct Table {
    cells: Vec<(Cell, Vec<Row>)>,
}

const HEADER: [&str; 10] = [
    "strategy",
    "by",
    "step ms",
    "exposed ms",
    "waits ms",
    "scalars ms",
    "tokens/s",
    "speed kept",
    "step / PyTorch",
    "exposed / PyTorch",
];

impl Table {
    pub(super) fn new(rows: Vec<Row>) -> Self {
        let mut cells: Vec<(Cell, Vec<Row>)> = Vec::new();
        for row in rows {
            let cell = (row.side, row.strategy);
            match cells.iter_mut().find(|(known, _)| *known == cell) {
                Some((_, rows)) => rows.push(row),
                None => cells.push((cell, vec![row])),
            }
        }
        Table { cells }
    }

    /// Whether everything that this machine has did run.
    pub(super) fn is_sound(&self) -> bool {
        let mut rows = self.cells.iter().flat_map(|(_, rows)| rows);
        rows.all(|row| row.outcome.is_some() || row.status.starts_with("not available"))
    }

    /// The table as text.
    pub(super) fn render(&self) -> String {
        let lines: Vec<[String; 10]> = self.cells.iter().map(|(cell, rows)| self.line(*cell, rows)).collect();
        let mut text = format!("{}\n\n{}", self.networks(), columns(&HEADER, &lines, 2));
        for ((side, strategy), rows) in &self.cells {
            let mut said: Vec<&str> =
                rows.iter().filter(|row| row.outcome.is_none()).map(|row| row.status.as_str()).collect();
            said.dedup();
            for why in said {
                text.push_str(&format!("\n{} by {side}: {why}", strategy.map_or("alone", StrategyKind::name)));
            }
        }
        text + LEGEND
    }

    /// The networks that runs went over, and what was measured of them.
    fn networks(&self) -> String {
        let mut lines: Vec<String> = Vec::new();
        for row in self.cells.iter().flat_map(|(_, rows)| rows).filter(|row| row.outcome.is_some()) {
            let measured = row.probe.map_or(String::new(), |probe| format!("; measured {probe}"));
            let line = format!("network: {}{measured}", row.network);
            if !lines.contains(&line) {
                lines.push(line);
            }
        }
        lines.join("\n")
    }

    fn line(&self, (side, strategy): Cell, rows: &[Row]) -> [String; 10] {
        let of = |of: fn(&Outcome) -> Option<f64>| -> Vec<f64> {
            rows.iter().filter_map(|row| of(row.outcome.as_ref()?)).collect()
        };
        let exposed: Vec<f64> = rows.iter().filter_map(|row| self.exposed_ms(row)).collect();
        let kept: Vec<f64> = rows.iter().filter_map(|row| Some(100.0 * self.alone_ms(row)? / row.step_ms()?)).collect();
        let communicates = strategy.is_some();
        let dash = || "-".to_string();
        [
            strategy.map_or("alone", StrategyKind::name).into(),
            side.to_string(),
            spread(&of(|outcome| Some(outcome.step_ms)), 1),
            if communicates { spread(&exposed, 1) } else { dash() },
            spread(&of(|outcome| outcome.waiting_ms), 1),
            middle(&of(|outcome| outcome.scalars_ms), 1),
            middle(&of(|outcome| Some(outcome.tokens_per_s)), 0),
            if communicates && !kept.is_empty() { format!("{}%", middle(&kept, 1)) } else { dash() },
            ratio(self.to_torch(rows, |_, row| row.step_ms())),
            if communicates { ratio(self.to_torch(rows, Table::exposed_ms)) } else { dash() },
        ]
    }

    /// What a step takes beyond one without communication on the same side, in the same round.
    fn exposed_ms(&self, row: &Row) -> Option<f64> {
        Some(row.step_ms()? - self.alone_ms(row)?)
    }

    /// What a step takes without communication, on the side and in the round of `row`.
    fn alone_ms(&self, row: &Row) -> Option<f64> {
        let side = if row.side == Side::Torch { Side::Torch } else { Side::Alone };
        self.find((side, None), row.round)?.step_ms()
    }

    /// `of` of ours as a multiple of that of PyTorch with the same strategy, round by round; `None` for PyTorch itself.
    fn to_torch(&self, rows: &[Row], of: impl Fn(&Table, &Row) -> Option<f64>) -> Option<Ratio> {
        let pairs = rows.iter().filter(|row| row.side != Side::Torch).filter_map(|row| {
            let theirs = self.find((Side::Torch, row.strategy), row.round)?;
            Some((of(self, row)?, of(self, theirs)?))
        });
        let (ours, theirs): (Vec<f64>, Vec<f64>) = pairs.unzip();
        Ratio::of(&ours, &theirs)
    }

    fn find(&self, cell: Cell, round: u32) -> Option<&Row> {
        let (_, rows) = self.cells.iter().find(|(known, _)| *known == cell)?;
        rows.iter().find(|row| row.round == round)
    }
}

impl Row {
    fn step_ms(&self) -> Option<f64> {
        self.outcome.as_ref().map(|outcome| outcome.step_ms)
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Side::Torch => "PyTorch",
            Side::Alone => "ours",
            Side::Ours(transport) => transport.name(),
        })
    }
}

impl Serialize for Side {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(match self {
            Side::Torch => "torch",
            Side::Alone => "alone",
            Side::Ours(transport) => transport.name(),
        })
    }
}

const LEGEND: &str = "\n\
    step: of the slowest rank, median over rounds (least-most). alone: all ranks at the same time, each by itself on its part of the batch.\n\
    exposed: step minus alone, of the same side in the same round. waits, scalars: how long a step of this program waits for gradients and \
    parameters, and for loss and gradient norm, by its own clock.\n\
    Both sides compute the gradient norm and all-reduce loss and norm in every step.\n\
    speed kept: alone / step. step / PyTorch, exposed / PyTorch: this program's time divided by PyTorch's with the same strategy, round by \
    round; below 1 this program is faster.";

#[cfg(test)]
mod tests {
    use super::*;

    fn row(round: u32, side: Side, strategy: Option<StrategyKind>, step_ms: f64) -> Row {
        let outcome = Outcome {
            step_ms,
            tokens_per_s: 1e6 / step_ms,
            waiting_ms: None,
            scalars_ms: None,
            first_loss: 1.0,
            final_loss: 1.0,
            payload_bytes: None,
        };
        Row {
            round,
            side,
            strategy,
            torch: None,
            network: String::new(),
            probe: None,
            ranks: 2,
            threads_per_rank: 1,
            model: ModelConfig { n_layer: 1, n_head: 1, n_embd: 1, block_size: 1, vocab_size: 1 },
            global_batch: 2,
            steps: 5,
            status: "ok".into(),
            outcome: Some(outcome),
            environment: Environment::read(),
        }
    }

    #[test]
    fn a_step_is_compared_with_the_same_round() {
        let ddp = Some(StrategyKind::Ddp);
        let shm = Side::Ours(TransportKind::SHM);
        let mut rows = Vec::new();
        for (round, factor) in [(1, 1.0), (2, 3.0)] {
            rows.push(row(round, shm, ddp, 60.0 * factor));
            rows.push(row(round, Side::Torch, ddp, 120.0 * factor));
            rows.push(row(round, Side::Torch, None, 100.0 * factor));
            rows.push(row(round, Side::Alone, None, 50.0 * factor));
        }
        sort(&mut rows, &[StrategyKind::Ddp]);
        let table = Table::new(rows.clone());
        let lines: Vec<[String; 10]> = table.cells.iter().map(|(cell, rows)| table.line(*cell, rows)).collect();
        assert_eq!(lines[3][3], "20.0 (10.0-30.0)", "exposed");
        assert_eq!(lines[3][7], "83.3%", "speed kept");
        assert_eq!(lines[3][8], "0.50 (0.50-0.50)", "step");
        assert_eq!(lines[3][9], "0.50 (0.50-0.50)", "exposed");
        assert_eq!(lines[1][8], "0.50 (0.50-0.50)", "alone");
        assert_eq!((lines[2][8].as_str(), lines[1][3].as_str()), ("-", "-"));
        assert!(table.is_sound());
        let failed = Row { status: "failed: x".into(), outcome: None, ..row(3, shm, ddp, 1.0) };
        rows.push(failed);
        let table = Table::new(rows);
        assert!(!table.is_sound() && table.render().contains("ddp by shm: failed: x"));
    }
}
