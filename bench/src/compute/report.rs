//! Rows of `bench compute`, and the tables over its rounds.

use gpt2::memory::{Allocations, Copies};
use gpt2::model::KernelChoice;
use gpt2::trainer::Parts;
use rig::environment::Environment;
use rig::record::{Cell, Record, Trainer};
use rig::stats::{Ratio, median};
use rig::text::{columns, middle, ratio, spread};
use rig::training::{model, outcome};
use serde::Serialize;

use super::layers::{BLOCK, Measured};
use super::peaks::Peaks;

/// What a run of whole steps came to: medians over its steps.
#[derive(Clone, Debug, Serialize)]
pub(super) struct StepFigures {
    step_ms: f64,
    tokens_per_s: f64,
    /// Of training, by the formula of the summary of `gpt2 train`.
    gflop_per_s: f64,
    /// Of the measured matrix peak.
    matrix_share: f64,
    /// Of the theoretical peak; `None` where that is not known.
    mfu: Option<f64>,
    /// The most memory that the process held, with its libraries.
    peak_rss_bytes: u64,
    /// The most that was allocated at one time, by our allocator's count.
    peak_allocated_bytes: Option<u64>,
    /// What a step asks for, likewise.
    allocations: Option<Allocations>,
    /// What a step copies and fills with zeros of gradients and parameters.
    copies: Option<Copies>,
    /// Where a step's time goes, as our trainer sees it.
    parts: Option<Parts>,
}

/// One run of one round: a line of `compute.jsonl`.
#[derive(Clone, Debug, Serialize)]
pub(super) struct StepRow {
    kind: &'static str,
    round: u32,
    preset: String,
    /// Tokens of a sequence.
    cols: usize,
    /// Sequences a step.
    rows: usize,
    parameters: usize,
    program: Trainer,
    /// Ours; PyTorch has its own.
    kernels: Option<String>,
    threads: usize,
    /// `ok`, or why there are no figures.
    status: String,
    #[serde(flatten)]
    figures: Option<StepFigures>,
    environment: Environment,
}

impl StepRow {
    /// The line of a record of a run.
    ///
    /// # Errors
    /// Its cell names what there is not.
    pub(super) fn of(record: &Record, peaks: &Peaks, vocabulary: usize) -> Result<Self, String> {
        let cell = &record.cell;
        let config = model(cell, vocabulary)?;
        let figures = outcome(record).and_then(|measured| {
            let trained = measured.trained.as_ref();
            let said = |of: Option<f64>| of.ok_or_else(|| "it left no times".to_string());
            let tokens_per_s = said(trained.and_then(|trained| trained.tokens_per_s))?;
            let flops = tokens_per_s * config.flops_per_token(config.block_size);
            let rank = measured.ranks.first().and_then(|rank| rank.trained.as_ref());
            Ok(StepFigures {
                step_ms: said(trained.and_then(|trained| trained.step_ms))?,
                tokens_per_s,
                gflop_per_s: flops / 1e9,
                matrix_share: peaks.matrix_share(flops),
                mfu: peaks.mfu(flops),
                peak_rss_bytes: measured.ranks.iter().map(|rank| rank.peak_rss_bytes).max().unwrap_or(0),
                peak_allocated_bytes: rank.and_then(|rank| rank.memory).map(|usage| usage.total.peak),
                allocations: rank.and_then(|rank| rank.allocations),
                copies: rank.and_then(|rank| rank.copies),
                parts: rank.map(|rank| rank.parts),
            })
        });
        Ok(StepRow {
            kind: "step",
            round: record.round,
            preset: cell.preset.clone(),
            cols: config.block_size,
            rows: cell.batch,
            parameters: config.parameter_count(),
            program: cell.program,
            kernels: (!cell.program.is_pytorch()).then(|| cell.kernels.clone()),
            threads: cell.threads,
            status: figures.as_ref().err().map_or("ok".into(), |why| format!("failed: {why}")),
            figures: figures.ok(),
            environment: record.environment.clone(),
        })
    }

    /// Whether it ran.
    pub(super) fn is_sound(&self) -> bool {
        self.figures.is_some()
    }

    fn case(&self) -> String {
        case(&self.preset, self.cols, self.rows)
    }

    fn by(&self) -> &str {
        name(self.program, self.kernels.as_deref())
    }
}

fn case(preset: &str, cols: usize, rows: usize) -> String {
    format!("{preset}:{cols}x{rows}")
}

/// By what something was measured, as the tables have it.
fn name(program: Trainer, kernels: Option<&str>) -> &str {
    match (program, kernels) {
        (Trainer::Ours, Some(kernels)) if !is_default(kernels) => kernels,
        (Trainer::Ours, _) => "ours",
        (Trainer::Pytorch, _) => PYTORCH,
        (Trainer::PytorchCompiled, _) => "compiled",
    }
}

const PYTORCH: &str = "PyTorch";

fn is_default(kernels: &str) -> bool {
    kernels == KernelChoice::default().name()
}

/// A line for each case by each program, over all rounds.
pub(super) fn steps(rows: &[StepRow]) -> String {
    const HEADER: [&str; 13] = [
        "case",
        "by",
        "step ms",
        "tokens/s",
        "GFLOP/s",
        "of matrix",
        "MFU",
        "peak MB",
        "allocs",
        "large",
        "MB asked",
        "MB copied",
        "speed",
    ];
    let mut cells: Vec<Vec<&StepRow>> = Vec::new();
    for row in rows {
        let same = |other: &&mut Vec<&StepRow>| other[0].case() == row.case() && other[0].by() == row.by();
        match cells.iter_mut().find(same) {
            Some(known) => known.push(row),
            None => cells.push(vec![row]),
        }
    }
    let line = |cell: &Vec<&StepRow>| -> [String; 13] {
        let of = |of: fn(&StepFigures) -> Option<f64>| -> Vec<f64> {
            cell.iter().filter_map(|row| of(row.figures.as_ref()?)).collect()
        };
        let asked = |count: fn(Allocations) -> u64, unit: f64| {
            let counts: Vec<f64> =
                cell.iter().filter_map(|row| Some(count(row.figures.as_ref()?.allocations?) as f64 / unit)).collect();
            middle(&counts, 0)
        };
        [
            cell[0].case(),
            cell[0].by().into(),
            spread(&of(|figures| Some(figures.step_ms)), 1),
            middle(&of(|figures| Some(figures.tokens_per_s)), 0),
            middle(&of(|figures| Some(figures.gflop_per_s)), 1),
            percent(&of(|figures| Some(figures.matrix_share))),
            percent(&of(|figures| figures.mfu)),
            middle(&of(|figures| Some(figures.peak_rss_bytes as f64 / 1e6)), 0),
            asked(|asked| asked.count, 1.0),
            asked(|asked| asked.large, 1.0),
            asked(|asked| asked.bytes, 1e6),
            middle(&of(|figures| figures.copies.map(|copies| (copies.copied + copies.zeroed) as f64 / 1e6)), 1),
            ratio(speed_of_ours(rows, cell)),
        ]
    };
    let lines: Vec<[String; 13]> = cells.iter().map(line).collect();
    let mut text = columns(&HEADER, &lines, 2);
    for cell in &cells {
        if let Some(row) = cell.iter().find(|row| !row.is_sound()) {
            text.push_str(&format!("\n{} by {}: {}", row.case(), row.by(), row.status));
        }
    }
    text
}

/// The step of others over ours of the same case, round by round: with fused kernels, or where those were not measured with the others.
fn speed_of_ours(rows: &[StepRow], theirs: &[&StepRow]) -> Option<Ratio> {
    let step_ms = |row: &StepRow| row.figures.as_ref().map(|figures| figures.step_ms);
    let ours = |row: &&StepRow| row.program == Trainer::Ours && row.case() == theirs[0].case();
    let default = rows.iter().filter(ours).find(|row| row.kernels.as_deref().is_some_and(is_default));
    let reference = default.or_else(|| rows.iter().find(ours))?;
    let pairs = theirs.iter().filter(|row| row.by() != reference.by()).filter_map(|theirs| {
        let same = |row: &&StepRow| ours(row) && row.by() == reference.by() && row.round == theirs.round;
        Some((step_ms(theirs)?, step_ms(rows.iter().find(same)?)?))
    });
    let (theirs, ours): (Vec<f64>, Vec<f64>) = pairs.unzip();
    Ratio::of(&theirs, &ours)
}

/// One layer in one round: a line of `compute.jsonl`.
#[derive(Clone, Debug, Serialize)]
pub(super) struct LayerRow {
    kind: &'static str,
    round: u32,
    preset: String,
    cols: usize,
    rows: usize,
    threads: usize,
    kernels: String,
    layer: &'static str,
    /// How many of it a step runs.
    times: usize,
    /// One of them, forward and backward.
    ms: f64,
    /// Of its matrix products; `None` for a layer without any.
    gflop_per_s: Option<f64>,
    matrix_share: Option<f64>,
    mfu: Option<f64>,
    /// What one asks for.
    allocations: Option<Allocations>,
    /// What one has allocated at most, beyond what was there before.
    peak_bytes: Option<u64>,
    /// The same layer in PyTorch, operation by operation.
    pytorch_ms: Option<f64>,
}

impl LayerRow {
    pub(super) fn of(
        cell: &Cell,
        round: u32,
        cols: usize,
        layer: Measured,
        pytorch_ms: Option<f64>,
        peaks: &Peaks,
    ) -> Self {
        let flops = (layer.flop > 0.0).then(|| layer.flop / layer.ms * 1e3);
        LayerRow {
            kind: "layer",
            round,
            preset: cell.preset.clone(),
            cols,
            rows: cell.batch,
            threads: cell.threads,
            kernels: cell.kernels.clone(),
            layer: layer.name,
            times: layer.times,
            ms: layer.ms,
            gflop_per_s: flops.map(|flops| flops / 1e9),
            matrix_share: flops.map(|flops| peaks.matrix_share(flops)),
            mfu: flops.and_then(|flops| peaks.mfu(flops)),
            allocations: layer.allocations,
            peak_bytes: layer.peak_bytes,
            pytorch_ms,
        }
    }

    /// As the table has it: a sum of the lines above it stands out.
    fn name(&self) -> String {
        if self.layer == BLOCK { format!("= {BLOCK}") } else { self.layer.into() }
    }
}

/// Lines for each layer of one case, over all rounds: one for each kind of kernels, and PyTorch's.
pub(super) fn layers(rows: &[LayerRow]) -> String {
    const HEADER: [&str; 13] = [
        "layer",
        "by",
        "times",
        "ms each",
        "ms a step",
        "GFLOP/s",
        "of matrix",
        "MFU",
        "allocs",
        "large",
        "MB asked",
        "peak MB",
        "speed",
    ];
    let Some(first) = rows.first() else { return String::new() };
    let (mut names, mut kinds): (Vec<&str>, Vec<&str>) = (Vec::new(), Vec::new());
    for row in rows {
        if !names.contains(&row.layer) {
            names.push(row.layer);
        }
        if !kinds.contains(&row.kernels.as_str()) {
            kinds.push(&row.kernels);
        }
    }
    let reference = kinds.iter().copied().find(|kernels| is_default(kernels)).unwrap_or(kinds[0]);
    let mut lines = Vec::new();
    for layer in names {
        let of = |kernels: &str| rows.iter().filter(|row| row.layer == layer && row.kernels == kernels).collect();
        let ours: Vec<&LayerRow> = of(reference);
        lines.extend(kinds.iter().map(|kernels| layer_line(&of(kernels), &ours)));
        lines.extend(pytorch_line(rows.iter().filter(|row| row.layer == layer), &ours));
    }
    format!(
        "{}, {} thread(s), layer by layer:\n{}",
        case(&first.preset, first.cols, first.rows),
        first.threads,
        columns(&HEADER, &lines, 2)
    )
}

/// The line of a layer by one kind of kernels, beside `ours`.
fn layer_line(rows: &[&LayerRow], ours: &[&LayerRow]) -> [String; 13] {
    let of = |of: &dyn Fn(&LayerRow) -> Option<f64>| -> Vec<f64> { rows.iter().filter_map(|row| of(row)).collect() };
    let asked = |count: fn(Allocations) -> u64, unit: f64, digits: usize| {
        middle(&of(&|row: &LayerRow| Some(count(row.allocations?) as f64 / unit)), digits)
    };
    let (times, kernels) = rows.first().map_or((0, ""), |row| (row.times, row.kernels.as_str()));
    let is_other = ours.first().is_some_and(|ours| ours.kernels != kernels);
    let ms = |row: &LayerRow| is_other.then_some((row.round, row.ms));
    [
        rows.first().map_or_else(String::new, |row| row.name()),
        name(Trainer::Ours, Some(kernels)).into(),
        times.to_string(),
        spread(&of(&|row: &LayerRow| Some(row.ms)), 2),
        middle(&of(&|row: &LayerRow| Some(row.ms * row.times as f64)), 1),
        middle(&of(&|row: &LayerRow| row.gflop_per_s), 1),
        percent(&of(&|row: &LayerRow| row.matrix_share)),
        percent(&of(&|row: &LayerRow| row.mfu)),
        asked(|asked| asked.count, 1.0, 0),
        asked(|asked| asked.large, 1.0, 0),
        asked(|asked| asked.bytes, 1e6, 1),
        middle(&of(&|row: &LayerRow| Some(row.peak_bytes? as f64 / 1e6)), 1),
        ratio(over_ours(rows.iter().filter_map(|row| ms(row)), ours)),
    ]
}

/// The line of a layer by PyTorch, where it was measured, beside `ours`.
fn pytorch_line<'a>(rows: impl Iterator<Item = &'a LayerRow>, ours: &[&LayerRow]) -> Option<[String; 13]> {
    let theirs: Vec<(u32, f64)> = rows.filter_map(|row| Some((row.round, row.pytorch_ms?))).collect();
    let (first, nothing) = (ours.first().filter(|_| !theirs.is_empty())?, || "-".to_string());
    let ms: Vec<f64> = theirs.iter().map(|(_, ms)| *ms).collect();
    let a_step: Vec<f64> = ms.iter().map(|ms| ms * first.times as f64).collect();
    Some([
        first.name(),
        PYTORCH.into(),
        first.times.to_string(),
        spread(&ms, 2),
        middle(&a_step, 1),
        nothing(),
        nothing(),
        nothing(),
        nothing(),
        nothing(),
        nothing(),
        nothing(),
        ratio(over_ours(theirs.into_iter(), ours)),
    ])
}

/// Times by round over ours of the same rounds.
fn over_ours(theirs: impl Iterator<Item = (u32, f64)>, ours: &[&LayerRow]) -> Option<Ratio> {
    let pairs = theirs.filter_map(|(round, ms)| Some((ms, ours.iter().find(|row| row.round == round)?.ms)));
    let (theirs, ours): (Vec<f64>, Vec<f64>) = pairs.unzip();
    Ratio::of(&theirs, &ours)
}

fn percent(shares: &[f64]) -> String {
    median(shares).map_or("-".into(), |share| format!("{:.0}%", 100.0 * share))
}

pub(super) const LEGEND: &str = "case: PRESET:TxB, B sequences of T tokens in a step. Times: medians over rounds (least-most). FLOP: for a \
    whole step 6N + 12·L·H·Q·T per token, for a layer those of its matrix products, forward and backward.\n\
    of matrix: share of the measured matrix peak; MFU: share of the theoretical one. peak MB: for a step the most memory that the process \
    held, libraries included; for a layer the most that it allocated beyond its input.\n\
    allocs, large, MB asked: number of allocations of a step (or one layer), number of those of 1 MiB and more, and bytes of all. MB \
    copied: bytes of gradients and parameters that a step copies or fills with zeros.\n\
    speed: the line's time divided by this program's with fused kernels in the same round (PyTorch's layers run operation by operation); \
    above 1 this program is faster. composed: this program, with the backend's single operations. block: a whole block, residual sums \
    included; optimizer: the gradient norm included, and moving gradients to the optimizer and weights back.";

#[cfg(test)]
mod tests {
    use super::*;

    fn step(round: u32, program: Trainer, step_ms: f64) -> StepRow {
        let figures = StepFigures {
            step_ms,
            tokens_per_s: 1e5 / step_ms,
            gflop_per_s: 50.0,
            matrix_share: 0.5,
            mfu: Some(0.25),
            peak_rss_bytes: 3_000_000,
            peak_allocated_bytes: None,
            allocations: (program == Trainer::Ours).then_some(Allocations { count: 10, bytes: 2_000_000, large: 1 }),
            copies: (program == Trainer::Ours).then_some(Copies { copied: 2_500_000, zeroed: 500_000 }),
            parts: None,
        };
        StepRow {
            kind: "step",
            round,
            preset: "tiny".into(),
            cols: 64,
            rows: 16,
            parameters: 1,
            program,
            kernels: (program == Trainer::Ours).then(|| "fused".into()),
            threads: 2,
            status: "ok".into(),
            figures: Some(figures),
            environment: Environment::read(),
        }
    }

    #[test]
    fn ours_are_compared_with_pytorch_of_the_same_round() {
        let mut rows = vec![
            step(1, Trainer::Ours, 100.0),
            step(2, Trainer::Ours, 200.0),
            step(1, Trainer::Pytorch, 150.0),
            step(2, Trainer::Pytorch, 400.0),
        ];
        let text = steps(&rows);
        let line = |by: &str| text.lines().find(|line| line.contains(by)).unwrap().to_string();
        let words = |by: &str| line(by).split_whitespace().map(String::from).collect::<Vec<_>>();
        let ours = [
            "tiny:64x16",
            "ours",
            "150.0",
            "(100.0-200.0)",
            "750",
            "50.0",
            "50%",
            "25%",
            "3",
            "10",
            "1",
            "2",
            "3.0",
            "-",
        ];
        assert_eq!(words("ours"), ours, "{text}");
        assert!(line("PyTorch").ends_with("1.75 (1.50-2.00)"), "{text}");
        let composed = |round, step_ms| {
            let row = step(round, Trainer::Ours, step_ms);
            StepRow { kernels: Some("composed".into()), ..row }
        };
        rows.splice(0..0, [composed(2, 500.0), composed(1, 300.0)]);
        let text = steps(&rows);
        let line = |by: &str| text.lines().find(|line| line.contains(by)).unwrap().to_string();
        assert!(
            line("composed").ends_with("2.75 (2.50-3.00)") && line("PyTorch").ends_with("1.75 (1.50-2.00)"),
            "{text}"
        );
        // By itself.
        let text = steps(&[composed(1, 300.0), step(1, Trainer::Pytorch, 150.0)]);
        assert!(text.contains("composed") && text.ends_with("0.50 (0.50-0.50)"), "{text}");
        rows.push(StepRow { status: "failed: x".into(), figures: None, ..step(1, Trainer::PytorchCompiled, 1.0) });
        let text = steps(&rows);
        assert!(text.contains("tiny:64x16 by compiled: failed: x") && !rows.iter().all(StepRow::is_sound), "{text}");
    }

    #[test]
    fn a_layer_is_held_against_both_peaks_other_kernels_and_pytorch() {
        let row = |round, ms, pytorch_ms| LayerRow {
            kernels: "fused".into(),
            kind: "layer",
            round,
            preset: "tiny".into(),
            cols: 64,
            rows: 16,
            threads: 2,
            layer: BLOCK,
            times: 4,
            ms,
            gflop_per_s: Some(80.0),
            matrix_share: Some(0.8),
            mfu: None,
            allocations: Some(Allocations { count: 7, bytes: 500_000, large: 0 }),
            peak_bytes: None,
            pytorch_ms,
        };
        let composed = |round, ms| LayerRow { kernels: "composed".into(), ..row(round, ms, None) };
        let rows =
            [row(1, 2.0, Some(3.0)), composed(1, 6.0), row(2, 4.0, Some(3.0)), composed(2, 8.0), row(3, 3.0, None)];
        let text = layers(&rows);
        let words: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        let [.., fused, composed, pytorch] = &words[..] else { panic!("{text}") };
        let ours = "= block ours 4 3.00 (2.00-4.00) 12.0 80.0 80% - 7 0 0.5 - -";
        assert_eq!(fused.join(" "), ours, "{text}");
        assert_eq!(
            composed.join(" "),
            "= block composed 4 7.00 (6.00-8.00) 28.0 80.0 80% - 7 0 0.5 - 2.50 (2.00-3.00)"
        );
        assert_eq!(pytorch.join(" "), "= block PyTorch 4 3.00 (3.00-3.00) 12.0 - - - - - - - 1.12 (0.75-1.50)");
    }
}
