//! The end of a run: whole weights from all ranks' parts, the checkpoint, the summary.

use std::borrow::Cow;

use comm_core::{CommunicatorExt, Deadline};

use super::rank::Trainer;
use super::{Parts, RankReport, StepReport, Summary, TrainConfig, TrainError, median};
use crate::checkpoint::{Checkpoint, WeightsHash};
use crate::corpus::Corpus;
use crate::flat::Flat;
use crate::memory::{self, Usage};
use crate::peak;
use crate::strategy::{Layout, StrategyOptions, formula};

impl Trainer<'_> {
    pub(super) fn summary(
        &mut self,
        corpus: &Corpus,
        reports: &[StepReport],
        validations: Vec<(u64, f64)>,
    ) -> Result<Summary, TrainError> {
        let config = self.config;
        let usage = self.memory();
        let (hash, weights) = self.apart(Self::collect)?;
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
        if !self.session.timing_only && ranks.iter().any(|rank| rank.weights_hash != hash) {
            let hashes: Vec<String> =
                ranks.iter().map(|rank| format!("rank {}: {:.12}", rank.rank, rank.weights_hash)).collect();
            return Err(TrainError::Diverged(hashes.join(", ")));
        }
        self.write(weights, corpus, config.steps)?;
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
                 reached together in {} before the run",
                self.flops_per_token / 1e6,
                self.peak_flops / 1e9,
                self.owned_by.len(),
                peak::yardstick(self.model.device(), config.precision)
            ),
            transport: self.facts(),
            checkpoint: self.checkpoint.clone(),
        })
    }

    /// Saves the masters, on rank 0; all ranks bring theirs.
    pub(super) fn save(&mut self, corpus: &Corpus, step: u64) -> Result<(), TrainError> {
        if !self.saves {
            return Ok(());
        }
        self.apart(|trainer| {
            let mut weights = Vec::new();
            // Where every rank has everything, there is nothing to bring.
            if trainer.writes() || !trainer.owns_everything() {
                for segment in 0..trainer.masters.len() {
                    let whole = trainer.whole_masters(segment)?;
                    if trainer.writes() {
                        weights.push(whole.into_owned());
                    }
                }
            }
            trainer.write(weights, corpus, step)
        })
    }

    /// Whether this rank saves.
    fn writes(&self) -> bool {
        self.checkpoint.is_some() && self.session.comm.rank() == 0
    }

    /// Writes a checkpoint of these weights, on the rank that saves.
    fn write(&self, weights: Vec<Vec<f32>>, corpus: &Corpus, step: u64) -> Result<(), TrainError> {
        let Some(path) = self.checkpoint.as_ref().filter(|_| self.writes()) else { return Ok(()) };
        let tokenizer = serde_json::to_value(corpus.tokenizer())
            .map_err(|error| comm_core::Error::Internal(format!("the tokenizer's description: {error}")))?;
        Ok(Checkpoint { config: self.config.model.clone(), tokenizer, step, weights }.save(path)?)
    }

    /// This rank's masters of one segment, in host memory.
    fn own_masters(&self, segment: usize) -> Result<Cow<'_, [f32]>, TrainError> {
        Ok(match &self.masters[segment] {
            Flat::Host(own) => Cow::Borrowed(own),
            own @ Flat::Device(_) => Cow::Owned(own.clone().into_host()?),
        })
    }

    /// All masters of one segment, from the ranks that have them.
    fn whole_masters(&self, segment: usize) -> Result<Cow<'_, [f32]>, TrainError> {
        let own = self.own_masters(segment)?;
        if self.owns_everything() {
            return Ok(own);
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
        Ok(Cow::Owned(self.scalars.all_gather_v(&own, &counts)?))
    }

    /// The hash of all masters, after a look whether this rank's model has the weights that follow from them; and, on the rank that
    /// saves, the masters.
    fn collect(&mut self) -> Result<(String, Vec<Vec<f32>>), TrainError> {
        let mut hash = WeightsHash::default();
        let mut weights = Vec::new();
        let keeps_model = self.strategy.computes() && !self.strategy.brings_weights();
        for segment in 0..self.masters.len() {
            // Where nothing arrives, there are no others' parts.
            let whole = match self.session.timing_only {
                true => self.own_masters(segment)?,
                false => self.whole_masters(segment)?,
            };
            hash.add(&whole);
            if keeps_model && !self.session.timing_only {
                let precision = self.config.precision;
                let expected = precision.unpack(precision.pack_into(&whole, 0, whole.len()))?;
                let found = self.model.read_params(segment)?;
                let equal = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
                if expected.len() != found.len() || !expected.iter().zip(&found).all(equal) {
                    return Err(TrainError::Diverged(format!(
                        "rank {}: the weights of segment {segment} are not those of the masters",
                        self.session.comm.rank()
                    )));
                }
            }
            if self.writes() {
                weights.push(whole.into_owned());
            }
        }
        Ok((hash.finish(), weights))
    }

    /// Facts about the transport, and about the nodes' where they have one of their own.
    fn facts(&self) -> Vec<(String, String)> {
        let mut facts = self.session.facts.clone();
        if let Some(node) = &self.session.node {
            facts.push(("ranks of a node".into(), node.size.to_string()));
            facts.extend(node.facts.iter().map(|(name, value)| (format!("inside a node: {name}"), value.clone())));
        }
        facts
    }

    fn rank_report(&self, weights_hash: String, steady: &[&StepReport], usage: Option<Usage>) -> RankReport {
        let (rank, ranks) = (self.session.comm.rank(), self.session.comm.world_size());
        let lengths: Vec<usize> = self.model.segments().iter().map(|segment| segment.len).collect();
        let TrainConfig { strategy: kind, precision, accumulation, .. } = *self.config;
        let mut options = self.config.options.clone();
        if let (0, Some(node)) = (options.ranks_per_node, &self.session.node) {
            options = StrategyOptions { ranks_per_node: node.size, ..options };
        }
        let checked = self.session.checked;
        let run = formula::Run { kind, options: &options, precision, accumulation, ranks, checked };
        let expected = formula::sent(run, &Layout::new(&lengths), rank);
        let between_nodes = self.session.counts_between_nodes();
        let expected = if between_nodes { expected.between_nodes() } else { expected };
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
            between_nodes,
            operations: middle(self.operations.clone()).unwrap_or(0),
            optimizer_steps: self.optimizers.steps(),
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
