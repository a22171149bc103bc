//! The end of a run: whole weights from all ranks' parts, the checkpoint, the summary.

use comm_core::{CommunicatorExt, Deadline};

use super::rank::Trainer;
use super::{Parts, RankReport, StepReport, Summary, TrainConfig, TrainError, median};
use crate::checkpoint::{Checkpoint, WeightsHash};
use crate::corpus::Corpus;
use crate::memory::{self, Usage};
use crate::strategy::{Layout, StrategyOptions, formula};

impl Trainer<'_> {
    pub(super) fn summary(
        &mut self,
        corpus: &Corpus,
        reports: &[StepReport],
        validations: Vec<(u64, f64)>,
    ) -> Result<Summary, TrainError> {
        let config = self.config;
        // Before anything is put together that training never holds.
        let usage = memory::usage();
        let hash = self.weights_hash()?;
        let whole: Vec<&StepReport> = reports.iter().filter(|report| !report.skipped).collect();
        let steady = &whole[if whole.len() > 4 { 2 } else { 0 }..];
        let mine = self.rank_report(hash.clone(), steady, usage);
        let blob = serde_json::to_vec(&mine)
            .map_err(|error| comm_core::Error::InvalidArgument(format!("a rank's report: {error}")))?;
        let ranks = self
            .session
            .control
            .all_gather("rank reports", &blob, Deadline::after(self.session.timeout))?
            .iter()
            .map(|blob| serde_json::from_slice(blob))
            .collect::<Result<Vec<RankReport>, _>>()
            .map_err(|error| comm_core::Error::Protocol {
                who: "a rank".into(),
                what: format!("its report: {error}"),
            })?;
        if ranks.iter().any(|rank| rank.weights_hash != hash) {
            let hashes: Vec<String> =
                ranks.iter().map(|rank| format!("rank {}: {:.12}", rank.rank, rank.weights_hash)).collect();
            return Err(TrainError::Diverged(hashes.join(", ")));
        }
        self.save(corpus, config.steps)?;
        Ok(Summary {
            steps: config.steps,
            weights_hash: hash,
            final_loss: reports.last().map_or(f64::NAN, |report| report.loss),
            validation_loss: validations.last().map(|(_, loss)| *loss),
            validations,
            losses: reports.iter().map(|report| report.loss).collect(),
            grad_norms: reports.iter().map(|report| report.grad_norm).collect(),
            epochs: reports.iter().map(|report| report.epoch).collect(),
            seconds: std::mem::take(&mut self.seconds),
            skipped_steps: reports.iter().filter(|report| report.skipped).count() as u64,
            tokens_per_s: median(steady.iter().map(|report| report.tokens_per_s)),
            step_ms: median(steady.iter().map(|report| report.ms)),
            parts: mine.parts,
            ranks,
            mfu: median(steady.iter().map(|report| report.mfu)),
            mfu_formula: format!(
                "tokens/s × {:.1} MFLOP a token (6N + 12·L·H·Q·T, N without positions) over {:.1} GFLOP/s, what the {} rank(s) \
                 reached together in f32 matrix products before the run",
                self.flops_per_token / 1e6,
                self.peak_flops / 1e9,
                self.owned_by.len()
            ),
            transport: self.session.facts.clone(),
            checkpoint: self.checkpoint.clone(),
        })
    }

    /// Saves the masters, on rank 0; all ranks bring theirs.
    pub(super) fn save(&mut self, corpus: &Corpus, step: u64) -> Result<(), TrainError> {
        if !self.saves {
            return Ok(());
        }
        let path = self.checkpoint.clone().filter(|_| self.session.comm.rank() == 0);
        let mut weights = Vec::new();
        for segment in 0..self.masters.len() {
            let whole = self.whole_masters(segment)?;
            if path.is_some() {
                weights.push(whole);
            }
        }
        let Some(path) = path else { return Ok(()) };
        let tokenizer = serde_json::to_value(corpus.tokenizer())
            .map_err(|error| comm_core::Error::Internal(format!("the tokenizer's description: {error}")))?;
        Ok(Checkpoint { config: self.config.model.clone(), tokenizer, step, weights }.save(&path)?)
    }

    /// All masters of one segment, from the ranks that have them.
    fn whole_masters(&self, segment: usize) -> Result<Vec<f32>, TrainError> {
        let own = &self.masters[segment];
        if self.owns_everything() {
            return Ok(own.clone());
        }
        let parts: Vec<(usize, usize)> = self.owned_by.iter().map(|rank| rank[segment]).collect();
        let mut end = 0;
        for (start, len) in parts.iter().filter(|(_, len)| *len > 0) {
            if *start != end {
                return Err(comm_core::Error::Internal(format!(
                    "the ranks' parts of segment {segment} do not follow one another: {parts:?}"
                ))
                .into());
            }
            end += len;
        }
        let counts: Vec<usize> = parts.iter().map(|(_, len)| *len).collect();
        Ok(self.scalars.all_gather_v(own, &counts)?)
    }

    /// The hash of all masters, after a look whether this rank's model has the weights that follow from them.
    fn weights_hash(&mut self) -> Result<String, TrainError> {
        let mut hash = WeightsHash::default();
        let keeps_model = self.strategy.computes() && !self.strategy.brings_weights();
        for segment in 0..self.masters.len() {
            let whole = self.whole_masters(segment)?;
            hash.add(&whole);
            if keeps_model {
                let precision = self.config.precision;
                let expected = precision.unpack(precision.pack(whole))?;
                let found = self.model.read_params(segment)?;
                let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                if bits(&expected) != bits(&found) {
                    return Err(TrainError::Diverged(format!(
                        "rank {}: the weights of segment {segment} are not those of the masters",
                        self.session.comm.rank()
                    )));
                }
            }
        }
        Ok(hash.finish())
    }

    fn rank_report(&self, weights_hash: String, steady: &[&StepReport], usage: Option<Usage>) -> RankReport {
        let (rank, ranks) = (self.session.comm.rank(), self.session.comm.world_size());
        let lengths: Vec<usize> = self.model.segments().iter().map(|segment| segment.len).collect();
        let TrainConfig { strategy: kind, precision, accumulation, .. } = *self.config;
        let mut options = self.config.options.clone();
        if let (0, Some(node)) = (options.ranks_per_node, &self.session.node) {
            options = StrategyOptions { ranks_per_node: node.comm.world_size(), ..options };
        }
        let run = formula::Run { kind, options: &options, precision, accumulation, ranks };
        let expected = formula::sent(run, &Layout::new(&lengths), rank);
        let middle = |mut values: Vec<u64>| {
            values.sort_unstable();
            values.get(values.len() / 2).copied()
        };
        let counted = |of: &dyn Fn(&super::traffic::Sent) -> u64| middle(self.sent.iter().map(of).collect());
        let node_sent = self.sent.iter().filter_map(|sent| sent.node).collect::<Vec<_>>();
        let gpu: Vec<f64> = steady.iter().filter_map(|report| report.gpu_utilization_percent).collect();
        RankReport {
            rank,
            computes: self.strategy.computes(),
            bytes_counted: counted(&|sent| sent.payload),
            bytes_expected: expected.payload,
            bytes_steady: self.sent.windows(2).all(|pair| pair[0].payload == pair[1].payload),
            scalar_bytes: counted(&|sent| sent.scalars),
            framing_bytes: counted(&|sent| sent.framing),
            messages: counted(&|sent| sent.messages),
            expected,
            node_sent: node_sent.get(node_sent.len() / 2).copied(),
            operations: middle(self.operations.clone()).unwrap_or(0),
            parts: median_parts(steady),
            cpu_utilization: median(steady.iter().map(|report| report.cpu_utilization)),
            gpu_utilization: (!gpu.is_empty()).then(|| median(gpu.into_iter())),
            peak_rss_bytes: memory::peak_rss_bytes() / self.session.ranks_in_process as u64,
            memory: usage,
            weights_hash,
        }
    }
}

fn median_parts(reports: &[&StepReport]) -> Parts {
    let of = |part: fn(&Parts) -> f64| median(reports.iter().map(|report| part(&report.parts)));
    Parts {
        data: of(|parts| parts.data),
        compute: of(|parts| parts.compute),
        pack: of(|parts| parts.pack),
        exposed: of(|parts| parts.exposed),
        scalars: of(|parts| parts.scalars),
        unpack: of(|parts| parts.unpack),
        optimizer: of(|parts| parts.optimizer),
        communication: of(|parts| parts.communication),
        hidden: of(|parts| parts.hidden),
    }
}
