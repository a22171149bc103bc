//! Rows of `bench overlap`, and the table over its rounds.

use gpt2::config::ModelConfig;
use gpt2::strategy::{LocalOptions, StrategyKind};
use isocomm::Rung;
use rig::environment::Environment;
use rig::link::{LinkOptions, Probe, Rate};
use rig::record::Record;
use rig::stats::{Ratio, median};
use rig::text::{columns, middle, ratio, spread};
use rig::training::Figures;
use serde::Serialize;

use super::options::Variant;

/// A strategy over a transport.
type Cell = (String, Variant);

/// One job of one round: a line of `overlap.jsonl`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) round: u32,
    pub(crate) strategy: Variant,
    pub(crate) transport: String,
    pub(crate) network: String,
    pub(crate) rate: Option<Rate>,
    pub(crate) mtu: Option<u32>,
    pub(crate) probe: Option<Probe>,
    pub(crate) ranks: usize,
    pub(crate) threads_per_rank: usize,
    pub(crate) model: ModelConfig,
    pub(crate) global_batch: usize,
    pub(crate) steps: u64,
    pub(crate) bucket_bytes: usize,
    pub(crate) wire: String,
    pub(crate) seed: u64,
    /// `ok`, or why there are no figures.
    pub(crate) status: String,
    #[serde(flatten)]
    pub(crate) figures: Option<Figures>,
    pub(crate) environment: Environment,
}

impl Row {
    /// The line of a record of a run that trained `model`.
    ///
    /// # Errors
    /// Its cell names what there is not.
    pub(super) fn of(record: &Record, model: &ModelConfig) -> Result<Self, String> {
        let cell = &record.cell;
        let figures = Figures::of(record);
        let link = record.measured.as_ref().map(|measured| measured.link.clone()).unwrap_or_default();
        let options: Option<LinkOptions> = cell.link.parse().ok();
        Ok(Row {
            round: record.round,
            strategy: Variant::of(cell)?,
            transport: cell.transport.clone(),
            network: link.description,
            rate: options.as_ref().and_then(|link| link.rate),
            mtu: options.map(|link| link.mtu),
            probe: link.probe,
            ranks: cell.ranks,
            threads_per_rank: cell.threads,
            model: model.clone(),
            global_batch: cell.batch,
            steps: cell.steps,
            bucket_bytes: cell.bucket_bytes,
            wire: cell.wire.clone(),
            seed: cell.seed,
            status: figures.as_ref().err().cloned().unwrap_or_else(|| "ok".into()),
            figures: figures.ok(),
            environment: record.environment.clone(),
        })
    }
}

/// All rounds of all cells.
pub(crate) struct Table {
    cells: Vec<(Cell, Vec<Row>)>,
}

const COLUMNS: usize = 12;

const HEADER: [&str; COLUMNS] = [
    "transport",
    "strategy",
    "step ms",
    "compute ms",
    "exposed ms",
    "scalars ms",
    "comm. ms",
    "hidden ms",
    "hidden",
    "slowed ms",
    "step / ring",
    "payload/step",
];

impl Table {
    /// Strategies of one transport beside one another, in the order of `variants`.
    pub(crate) fn new(rows: Vec<Row>, variants: &[Variant]) -> Self {
        let mut cells: Vec<(Cell, Vec<Row>)> = Vec::new();
        for row in rows {
            let cell = (row.transport.clone(), row.strategy);
            match cells.iter_mut().find(|(known, _)| *known == cell) {
                Some((_, rows)) => rows.push(row),
                None => cells.push((cell, vec![row])),
            }
        }
        let mut transports: Vec<String> = cells.iter().map(|((transport, _), _)| transport.clone()).collect();
        transports.dedup();
        cells.sort_by_key(|((transport, variant), _)| {
            (transports.iter().position(|name| name == transport), variants.iter().position(|known| known == variant))
        });
        Table { cells }
    }

    /// Whether everything that this build has did run, and each strategy came to the same weights over every transport.
    pub(crate) fn is_sound(&self) -> bool {
        let rows = || self.cells.iter().flat_map(|(_, rows)| rows);
        rows().all(|row| row.figures.is_some() || row.status.starts_with("not available"))
            && self.disagreements().is_empty()
    }

    /// The table as text.
    pub(crate) fn render(&self) -> String {
        let lines: Vec<[String; COLUMNS]> = self.cells.iter().map(|(cell, rows)| self.line(cell, rows)).collect();
        let mut text = format!("{}\n\n{}", self.networks(), columns(&HEADER, &lines, 2));
        for ((transport, variant), rows) in &self.cells {
            let mut said: Vec<&str> =
                rows.iter().filter(|row| row.figures.is_none()).map(|row| row.status.as_str()).collect();
            said.dedup();
            for why in said {
                text.push_str(&format!("\n{variant} over {transport}: {why}"));
            }
        }
        let most =
            self.cells.iter().flat_map(|(_, rows)| rows).filter_map(|row| row.figures.as_ref()?.payload_bytes).max();
        let rate = self.cells.iter().flat_map(|(_, rows)| rows).find_map(|row| row.rate);
        if let Some((bytes, ms)) = most.and_then(|bytes| Some((bytes, rate?.ms_of(bytes)))) {
            text.push_str(&format!(
                "\nAt the link's rate {:.2} MB take {ms:.1} ms, headers not included",
                bytes as f64 / 1e6
            ));
        }
        text.push_str(LEGEND);
        for disagreement in self.disagreements() {
            text.push_str(&format!("\nDIFFERENT WEIGHTS: {disagreement}"));
        }
        text
    }

    /// The networks that runs went over, and what was measured of them.
    fn networks(&self) -> String {
        let mut lines: Vec<String> = Vec::new();
        for row in self.cells.iter().flat_map(|(_, rows)| rows).filter(|row| row.figures.is_some()) {
            let measured = row.probe.map_or(String::new(), |probe| format!("; measured {probe}"));
            let line = format!("network: {}{measured}", row.network);
            if !lines.contains(&line) {
                lines.push(line);
            }
        }
        lines.join("\n")
    }

    fn line(&self, (transport, variant): &Cell, rows: &[Row]) -> [String; COLUMNS] {
        let all = |of: fn(&Figures) -> f64| -> Vec<f64> {
            rows.iter().filter_map(|row| row.figures.as_ref()).map(of).collect()
        };
        let bytes = rows.iter().filter_map(|row| row.figures.as_ref()?.payload_bytes).max();
        [
            transport.to_string(),
            variant.to_string(),
            spread(&all(|figures| figures.step_ms), 1),
            middle(&all(|figures| figures.compute_ms), 1),
            spread(&all(|figures| figures.exposed_ms), 1),
            middle(&all(|figures| figures.scalars_ms), 1),
            middle(&all(|figures| figures.communication_ms), 1),
            middle(&all(|figures| figures.hidden_ms), 1),
            share(median(&all(|figures| figures.hidden_ms)), median(&all(|figures| figures.communication_ms))),
            spread(&self.slowed_ms(rows), 1),
            ratio(self.to_ring(transport, rows)),
            bytes.map_or("-".into(), |bytes| format!("{:.2} MB", bytes as f64 / 1e6)),
        ]
    }

    /// How much longer the passes take than by the same strategy over the transport that moves nothing, round by round.
    fn slowed_ms(&self, rows: &[Row]) -> Vec<f64> {
        let compute_ms = |row: &Row| row.figures.as_ref().map(|figures| figures.compute_ms);
        let undisturbed = |row: &Row| {
            let cells = self.cells.iter().filter(|((_, variant), _)| *variant == row.strategy);
            let mut rows = cells.flat_map(|(_, rows)| rows);
            rows.find(|other| moves_nothing(other) && other.round == row.round).and_then(compute_ms)
        };
        let moving = rows.iter().filter(|row| !moves_nothing(row));
        moving.filter_map(|row| Some(compute_ms(row)? - undisturbed(row)?)).collect()
    }

    /// Step time as a multiple of that of `ring`, which overlaps, over the same transport, round by round.
    fn to_ring(&self, transport: &str, rows: &[Row]) -> Option<Ratio> {
        const RING: Variant = Variant { strategy: StrategyKind::Ring, overlap: true };
        let ring = |(name, variant): &Cell| name == transport && *variant == RING;
        let (_, rings) = self.cells.iter().find(|(cell, _)| ring(cell))?;
        let step_ms = |row: &Row| row.figures.as_ref().map(|figures| figures.step_ms);
        let pairs: Vec<(f64, f64)> = rows
            .iter()
            .filter_map(|row| {
                let ring = rings.iter().find(|ring| ring.round == row.round)?;
                Some((step_ms(row)?, step_ms(ring)?))
            })
            .collect();
        let (ours, theirs): (Vec<f64>, Vec<f64>) = pairs.into_iter().unzip();
        Ratio::of(&ours, &theirs)
    }

    /// Cells of one strategy whose weights are not those of the first, in words.
    fn disagreements(&self) -> Vec<String> {
        let mut found = Vec::new();
        let mut first: Vec<(Variant, &Row, &str)> = Vec::new();
        let usual = LocalOptions::default().staleness;
        // Where nothing arrives weights are nobody's.
        let counts = |row: &&Row| !moves_nothing(row) && row.strategy.strategy.is_repeatable(usual);
        for row in self.cells.iter().flat_map(|(_, rows)| rows).filter(counts) {
            let Some(figures) = &row.figures else { continue };
            let name = |row: &Row| format!("round {} over {}", row.round, row.transport);
            match first.iter().find(|(variant, ..)| *variant == row.strategy) {
                None => first.push((row.strategy, row, &figures.weights_hash)),
                Some((_, other, hash)) if **hash != *figures.weights_hash => {
                    found.push(format!("{}, {} and {}", row.strategy, name(other), name(row)));
                }
                Some(_) => {}
            }
        }
        found
    }
}

/// Whether its transport moves nothing.
fn moves_nothing(row: &Row) -> bool {
    row.transport.parse().is_ok_and(Rung::is_timing_only)
}

const LEGEND: &str = "\n\
    step: median over rounds (least-most). exposed: how long a step waits for gradients and parameters, on the rank that waits longest. \
    scalars: how long it waits for loss and gradient norm.\n\
    compute: forward and backward pass, on the slowest rank.\n\
    slowed: by how much communication slows the passes down: compute minus the compute of the same strategy over `null`, which sends nothing, \
    in the same round; median (least-most). Overlap saves hidden minus slowed.\n\
    comm.: how long at least one operation is in progress, waiting for the other rank included. hidden: the part of it that is not exposed.\n\
    step / ring: step time divided by that of ring over the same transport, round by round; median (least-most). Below 1 it is faster than ring.";

/// `part` of `whole` in percent.
fn share(part: Option<f64>, whole: Option<f64>) -> String {
    let percent = part.zip(whole).filter(|(_, whole)| *whole > 0.0).map(|(part, whole)| 100.0 * part / whole);
    percent.map_or("-".into(), |percent| format!("{percent:.0}%"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(round: u32, transport: &str, compute_ms: f64, weights: &str) -> Row {
        let figures = Figures {
            step_ms: 100.0,
            tokens_per_s: 1.0,
            exposed_ms: 5.0,
            scalars_ms: 0.0,
            communication_ms: 40.0,
            hidden_ms: 35.0,
            compute_ms,
            payload_bytes: None,
            first_loss: 1.0,
            final_loss: 1.0,
            weights_hash: weights.into(),
            transport_facts: Vec::new(),
        };
        Row {
            round,
            strategy: Variant { strategy: StrategyKind::Ddp, overlap: true },
            transport: transport.into(),
            network: String::new(),
            rate: None,
            mtu: None,
            probe: None,
            ranks: 2,
            threads_per_rank: 1,
            model: ModelConfig { n_layer: 1, n_head: 1, n_embd: 1, block_size: 1, vocab_size: 1 },
            global_batch: 2,
            steps: 5,
            bucket_bytes: 1,
            wire: "f32".into(),
            seed: 1,
            status: "ok".into(),
            figures: Some(figures),
            environment: Environment::read(),
        }
    }

    #[test]
    fn hidden_communication_is_charged_what_it_costs_the_passes() {
        let rows = vec![
            row(1, "tcp-raw", 70.0, "a"),
            row(2, "tcp-raw", 90.0, "a"),
            row(1, "null", 60.0, "b"),
            row(2, "null", 61.0, "c"),
        ];
        let table = Table::new(rows, &[Variant { strategy: StrategyKind::Ddp, overlap: true }]);
        let slowed = HEADER.iter().position(|name| *name == "slowed ms").unwrap();
        let lines: Vec<String> =
            table.cells.iter().map(|(cell, rows)| table.line(cell, rows)[slowed].clone()).collect();
        assert_eq!(lines, ["19.5 (10.0-29.0)", "-"]);
        assert!(table.is_sound(), "weights over null are nobody's: {:?}", table.disagreements());
    }
}
