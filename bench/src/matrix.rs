//! Every strategy over every transport.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use gpt2::cli::say;
use gpt2::strategy::StrategyKind;
use gpt2::transports::TransportKind;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::BenchError;
use crate::args::Setup;
use crate::cell::{Cell, Row};
use crate::table;

/// Runs the matrix; true if every cell that this machine can run did, and sent what the formula says.
pub(crate) fn run(setup: &Setup) -> Result<bool, BenchError> {
    let model = setup.preset.config(setup.corpus.vocab_size());
    say(format_args!(
        "\nmatrix: {} ({:.2} M parameters, bytes), {} ranks × {} thread(s), {} sequences of {} tokens a step, {} steps, wire {}",
        setup.preset,
        model.parameter_count() as f64 / 1e6,
        setup.ranks,
        setup.threads,
        setup.batch,
        model.block_size,
        setup.steps,
        setup.wire
    ));
    let cells = cells(setup);
    let mut file = Lines::create(&setup.out.join("results.jsonl"))?;
    let bar = bar(cells.len());
    let mut rows: Vec<Row> = Vec::new();
    for cell in &cells {
        bar.set_message(cell.name());
        setup.go_on()?;
        let row = match cell.transport.and_then(|transport| transport.missing()) {
            Some(reason) => cell.skipped(setup, &reason),
            None => cell.run(setup)?,
        };
        file.write(&row)?;
        rows.push(row);
        bar.inc(1);
    }
    bar.finish_and_clear();
    say(format_args!("{}", table::render(&rows)));
    say(format_args!(
        "exposed: how long a step waits for communication, the scalars of loss and norm included; median over steps, the largest over ranks"
    ));
    say(format_args!("rows: {}", setup.out.join("results.jsonl").display()));
    Ok(rows.iter().all(|row| row.is_sound() || row.status.starts_with("not available")))
}

fn cells(setup: &Setup) -> Vec<Cell> {
    let cell = |strategy, transport, ranks| Cell {
        strategy,
        transport,
        ranks,
        preset: setup.preset,
        steps: setup.steps,
        batch: setup.batch,
        threads: setup.threads,
        node_transport: None,
    };
    let mut cells = Vec::new();
    for strategy in &setup.strategies {
        match strategy {
            StrategyKind::Single => cells.push(cell(*strategy, None, 1)),
            // Two nodes of two ranks are the least that has two levels.
            StrategyKind::Hierarchical if setup.batch.is_multiple_of(setup.ranks.max(4)) => {
                cells.extend(setup.transports.iter().map(|transport| Cell {
                    node_transport: Some(match transport {
                        TransportKind::Local => TransportKind::Local,
                        _ => TransportKind::Shm,
                    }),
                    ..cell(*strategy, Some(*transport), setup.ranks.max(4))
                }));
            }
            _ => cells.extend(setup.transports.iter().map(|transport| cell(*strategy, Some(*transport), setup.ranks))),
        }
    }
    cells
}

/// A bar on a terminal; elsewhere nothing.
pub(crate) fn bar(len: usize) -> ProgressBar {
    let bar = ProgressBar::new(len as u64);
    if let Ok(style) = ProgressStyle::with_template("{wide_bar} {pos}/{len} {msg} ({elapsed})") {
        bar.set_style(style);
    }
    bar
}

/// A file of JSON lines, each on disk as soon as it is known.
pub(crate) struct Lines {
    file: File,
    path: String,
}

impl Lines {
    pub(crate) fn create(path: &Path) -> Result<Self, BenchError> {
        // Rows of an earlier run are hours of somebody's time.
        let file = File::create_new(path)
            .map_err(|error| format!("{}: {error}; give a new folder with --out", path.display()))?;
        Ok(Lines { file, path: path.display().to_string() })
    }

    pub(crate) fn write(&mut self, value: &impl Serialize) -> Result<(), BenchError> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        self.file.write_all(&line).map_err(|error| format!("{}: {error}", self.path).into())
    }
}
