//! The layers of a model by themselves, and what can be timed of a whole pass from outside.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use comm_core::Buffer;
use gpt2::config::ModelConfig;
use gpt2::memory::{self, Allocations};
use gpt2::segments::{BlockLayer, Compute, ModelError, Pass, PassHooks, SegmentGrads, SegmentedModel, TokenBatch};
use rig::BenchError;
use rig::outcome;
use rig::record::{Cell, Record};
use rig::signal::Signals;
use rig::stats::median;
use rig::training::{TextSource, model};

use super::peaks::Peaks;
use super::report::LayerRow;
use crate::pytorch::Torch;

/// What measures layers.
pub(super) struct Layers<'a> {
    pub(super) text: &'a TextSource,
    pub(super) peaks: &'a Peaks,
    /// PyTorch, if it is to be measured too.
    pub(super) torch: Option<&'a Torch>,
    pub(super) signals: &'a Signals,
    /// The longest that PyTorch may take for a case.
    pub(super) timeout: Duration,
}

/// What was measured of a layer of one kind.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Measured {
    pub(super) name: &'static str,
    /// How many of it a step runs.
    pub(super) times: usize,
    /// One of them forward and backward.
    pub(super) ms: f64,
    /// FLOP of the matrix products of one.
    pub(super) flop: f64,
    /// What one asked for; `None` where nothing counts.
    pub(super) allocations: Option<Allocations>,
    /// Bytes that one had allocated at most beyond what was there before; `None` where nothing counts, and for parts of a whole pass.
    pub(super) peak_bytes: Option<u64>,
}

pub(super) const EMBEDDING: &str = "embedding";
pub(super) const BLOCK: &str = "block";
pub(super) const HEAD: &str = "head and loss";
pub(super) const OPTIMIZER: &str = "optimizer";

impl Layers<'_> {
    /// Measures a case, of which there is a cell for each kind of kernels, those and PyTorch's in turns; and why PyTorch's has no figures, if it
    /// has failed. `records` are those of whole steps.
    pub(super) fn measure(
        &self,
        cells: &[&Cell],
        rounds: u32,
        records: &[Record],
    ) -> Result<(Vec<LayerRow>, Option<String>), BenchError> {
        let config = model(cells[0], self.text.vocabulary)?;
        let cols = config.block_size;
        let pool = &self.peaks.pool;
        let models = cells.iter().map(|cell| pool.install(|| computing_as(&config, cell)));
        let mut models: Vec<SegmentedModel> = models.collect::<Result<_, _>>()?;
        let batch = tokens(&config, cells[0].batch);
        let (mut found, mut complaint) = (Vec::new(), None);
        for round in 1..=rounds {
            let mut theirs = self.theirs(cells[0], &mut complaint)?;
            for (cell, model) in cells.iter().zip(&mut models) {
                self.signals.check()?;
                let mut layers = pool.install(|| ours(model, &batch))?;
                let step = records.iter().find(|run| run.round == round && run.cell == **cell);
                layers.extend(step.and_then(optimizer));
                // They are the same for all kinds of kernels.
                let theirs = std::mem::take(&mut theirs);
                let row = |layer: Measured| {
                    let pytorch_ms = theirs.get(layer.name).copied();
                    LayerRow::of(cell, round, cols, layer, pytorch_ms, self.peaks)
                };
                found.extend(layers.into_iter().map(row));
            }
        }
        Ok((found, complaint))
    }

    /// PyTorch's layers, in ms; none where it is not to be measured, or has failed, which is then the complaint.
    fn theirs(&self, cell: &Cell, complaint: &mut Option<String>) -> Result<BTreeMap<String, f64>, BenchError> {
        let Some(torch) = self.torch.filter(|_| complaint.is_none()) else { return Ok(BTreeMap::new()) };
        Ok(outcome::settled(torch.layers(cell, self.text, self.timeout))?.unwrap_or_else(|why| {
            *complaint = Some(why);
            BTreeMap::new()
        }))
    }
}

/// A model that computes by the cell's kernels.
fn computing_as(config: &ModelConfig, cell: &Cell) -> Result<SegmentedModel, BenchError> {
    let compute = Compute { kernels: cell.kernels.parse()?, ..Compute::default() };
    let mut model = SegmentedModel::absent(config.clone(), compute, &Device::flex())?;
    for segment in 0..model.segments().len() {
        let weights = model.segments()[segment].initial(config, cell.seed);
        model.put_params(segment, Buffer::from_vec(weights))?;
    }
    Ok(model)
}

/// Ids as good as any: each of the vocabulary may come.
fn tokens(config: &ModelConfig, rows: usize) -> TokenBatch {
    let cols = config.block_size;
    let ids: Vec<i32> =
        (0..rows * cols + 1).map(|at| (at * 7919 % config.vocab_size).try_into().unwrap_or(0)).collect();
    TokenBatch { inputs: ids[..rows * cols].to_vec(), targets: ids[1..].to_vec(), rows, cols }
}

/// The layers of a model, in the order of a step.
fn ours(model: &mut SegmentedModel, batch: &TokenBatch) -> Result<Vec<Measured>, ModelError> {
    let (config, tokens) = (model.config().clone(), (batch.rows * batch.cols) as f64);
    let whole = in_a_pass(model, batch)?;
    let part = |name: &'static str, times: usize, of: usize, flop: f64| {
        let of_passes = |figure: &dyn Fn(&InPass) -> f64| {
            median(&whole.iter().map(figure).collect::<Vec<_>>()).unwrap_or(f64::NAN) / times as f64
        };
        let count = |figure: fn(Allocations) -> u64| {
            move |pass: &InPass| pass.allocations[of].map_or(f64::NAN, |asked| figure(asked) as f64)
        };
        let allocations = whole.iter().all(|pass| pass.allocations[of].is_some()).then(|| Allocations {
            count: of_passes(&count(|asked| asked.count)).round() as u64,
            bytes: of_passes(&count(|asked| asked.bytes)).round() as u64,
            large: of_passes(&count(|asked| asked.large)).round() as u64,
        });
        let ms = of_passes(&|pass: &InPass| pass.time[of].as_secs_f64() * 1e3);
        Measured { name, times, ms, flop, allocations, peak_bytes: None }
    };
    let layers = config.n_layer;
    let mut found = vec![part(EMBEDDING, 1, InPass::EMBEDDING, 0.0)];
    let mut of_block = 0.0;
    for layer in BlockLayer::ALL {
        let flop = tokens * layer.flops_per_token(&config, batch.cols);
        of_block += flop * layer.in_a_block() as f64;
        // The norm before the head is one more.
        let times = layers * layer.in_a_block() + usize::from(layer == BlockLayer::LayerNorm);
        found.push(alone(model, layer, batch, times, flop)?);
    }
    found.push(part(BLOCK, layers, InPass::BLOCKS, of_block));
    let head = 6.0 * tokens * (config.vocab_size * config.n_embd) as f64;
    found.push(part(HEAD, 1, InPass::HEAD, head));
    Ok(found)
}

/// How long a layer is run, at least, and how often.
const LEAST_TIME: Duration = Duration::from_millis(150);
const LEAST_RUNS: usize = 4;

fn alone(
    model: &SegmentedModel,
    layer: BlockLayer,
    batch: &TokenBatch,
    times: usize,
    flop: f64,
) -> Result<Measured, ModelError> {
    let run = model.layer_run(layer, batch.rows, batch.cols)?;
    run.run()?;
    let before = memory::usage().map(|usage| usage.total.current);
    memory::reset_peaks();
    let (began, mut measured, mut asked) = (Instant::now(), Vec::new(), None);
    while measured.len() < LEAST_RUNS || began.elapsed() < LEAST_TIME {
        let (start, earlier) = (Instant::now(), memory::allocations());
        run.run()?;
        measured.push(start.elapsed().as_secs_f64() * 1e3);
        asked = memory::allocations().zip(earlier).map(|(now, earlier)| now.since(earlier));
    }
    let peak = memory::usage().map(|usage| usage.total.peak);
    Ok(Measured {
        name: layer.name(),
        times,
        ms: median(&measured).unwrap_or(f64::NAN),
        flop,
        allocations: asked,
        peak_bytes: peak.zip(before).map(|(peak, before)| peak.saturating_sub(before)),
    })
}

/// Whole passes forward and backward, without a step.
fn in_a_pass(model: &mut SegmentedModel, batch: &TokenBatch) -> Result<Vec<InPass>, ModelError> {
    let last = model.segments().len() - 1;
    let pass = |model: &mut SegmentedModel| {
        let mut hooks = InPass::new(last);
        model.train(batch, 1.0, &mut hooks).map(|_| hooks)
    };
    pass(model)?;
    let (began, mut found) = (Instant::now(), Vec::new());
    while found.len() < 2 || began.elapsed() < 2 * LEAST_TIME {
        found.push(pass(model)?);
    }
    Ok(found)
}

/// Times the parts of a pass that begin and end where its hooks are called.
#[derive(Debug)]
struct InPass {
    last: usize,
    since: (Instant, Option<Allocations>),
    time: [Duration; 4],
    allocations: [Option<Allocations>; 4],
}

impl InPass {
    const EMBEDDING: usize = 0;
    const BLOCKS: usize = 1;
    const NORM: usize = 2;
    const HEAD: usize = 3;

    fn new(last: usize) -> Self {
        InPass { last, since: (Instant::now(), None), time: [Duration::ZERO; 4], allocations: [None; 4] }
    }

    /// A part begins.
    fn begin(&mut self) {
        self.since = (Instant::now(), memory::allocations());
    }

    /// What has begun was of this part; the next begins.
    fn end(&mut self, part: usize) {
        let (start, earlier) = self.since;
        self.time[part] += start.elapsed();
        if let Some((now, earlier)) = memory::allocations().zip(earlier) {
            let (asked, known) = (now.since(earlier), self.allocations[part].unwrap_or_default());
            self.allocations[part] = Some(Allocations {
                count: known.count + asked.count,
                bytes: known.bytes + asked.bytes,
                large: known.large + asked.large,
            });
        }
        self.begin();
    }
}

impl PassHooks<ModelError> for InPass {
    fn enter(&mut self, _model: &mut SegmentedModel, pass: Pass, segment: usize) -> Result<(), ModelError> {
        match (pass, segment) {
            (Pass::Forward, 1) => self.end(InPass::EMBEDDING),
            (Pass::Backward, segment) if segment == self.last => self.end(InPass::HEAD),
            // The gradients of the segment before were handed out since.
            (Pass::Forward, 0) | (Pass::Backward, _) => self.begin(),
            _ => {}
        }
        Ok(())
    }

    fn leave(&mut self, _model: &mut SegmentedModel, pass: Pass, segment: usize) -> Result<(), ModelError> {
        match (pass, segment) {
            (Pass::Backward, 0) => self.end(InPass::EMBEDDING),
            (_, segment) if segment == self.last => self.end(InPass::NORM),
            _ => self.end(InPass::BLOCKS),
        }
        Ok(())
    }

    fn gradients(&mut self, _grads: SegmentGrads) -> Result<(), ModelError> {
        Ok(())
    }
}

/// The optimizer of a run, with what brings gradients to it and weights back, as the trainer times them.
fn optimizer(run: &Record) -> Option<Measured> {
    let parts = run.measured.as_ref()?.ranks.first()?.trained.as_ref()?.parts;
    let ms = parts.pack + parts.optimizer + parts.unpack;
    Some(Measured { name: OPTIMIZER, times: 1, ms, flop: 0.0, allocations: None, peak_bytes: None })
}

#[cfg(test)]
mod tests {
    use gpt2::config::Preset;
    use gpt2::model::KernelChoice;

    use super::*;

    #[test]
    fn each_layer_is_measured_as_often_as_a_step_runs_it() {
        for kernels in KernelChoice::ALL {
            each_layer_is_measured_by(kernels);
        }
    }

    fn each_layer_is_measured_by(kernels: KernelChoice) {
        let config = Preset::Micro.config(300);
        let cell = Cell { kernels: kernels.name().into(), ..Cell::default() };
        let mut model = computing_as(&config, &cell).unwrap();
        assert_eq!(model.compute().kernels, kernels);
        let found = ours(&mut model, &tokens(&config, 2)).unwrap();
        let names: Vec<(&str, usize)> = found.iter().map(|layer| (layer.name, layer.times)).collect();
        let expected = [
            ("embedding", 1),
            ("layer norm", 5),
            ("qkv", 2),
            ("attention", 2),
            ("proj", 2),
            ("mlp", 2),
            ("block", 2),
            ("head and loss", 1),
        ];
        assert_eq!(names, expected);
        assert!(found.iter().all(|layer| layer.ms > 0.0 && layer.ms.is_finite()), "{found:?}");
        let flop = |name: &str| found.iter().find(|layer| layer.name == name).unwrap().flop;
        // 64 tokens, 32 wide, sequences of 32: forward and backward thrice the products of the forward pass.
        assert_eq!(flop("qkv"), 3.0 * 2.0 * 64.0 * 32.0 * 96.0);
        assert_eq!(flop("attention"), 3.0 * 2.0 * 2.0 * 64.0 * 32.0 * 32.0);
        assert_eq!(flop("head and loss"), 3.0 * 2.0 * 64.0 * 32.0 * 300.0);
        let inside = ["qkv", "attention", "proj", "mlp"].map(flop).iter().sum::<f64>();
        assert_eq!(flop("block"), inside);
    }
}
