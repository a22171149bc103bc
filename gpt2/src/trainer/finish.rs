//! The end of a run: whole weights from all ranks' parts, the checkpoint, the summary.

use std::borrow::Cow;
use std::mem;
use std::path::Path;

use comm_core::{CommunicatorExt, Deadline, ReduceOp};

use super::history::History;
use super::rank::Trainer;
use super::{NODES, Parts, RankReport, Summary, TrainError, median};
use crate::checkpoint::{self, Checkpoint, CheckpointError, WeightsHash, save_companions};
use crate::corpus::Corpus;
use crate::flat::Flat;
use crate::memory::{self, Usage};

/// The rank that saves.
const SAVES: usize = 0;

impl Trainer<'_> {
    /// Puts the summary together and saves the weights, on the rank that saves. What goes wrong once the weights are there costs no more than
    /// itself, and comes beside the summary.
    ///
    /// # Errors
    /// Where there is no summary: no step was taken, the weights cannot be brought together, or ranks differ in them.
    pub(super) fn summary(
        &mut self,
        corpus: &Corpus,
        validations: Vec<(u64, f64)>,
    ) -> Result<(Summary, Result<(), TrainError>), TrainError> {
        let steps = self.config.steps;
        if !self.has_stepped()? {
            self.local.scaler.finish(steps).map_err(|error| TrainError::Scaling { step: steps, error })?;
        }
        let usage = self.memory();
        let (hash, weights) = self.apart(Self::collect)?;
        let mine = self.rank_report(hash.clone(), usage);
        let (ranks, heard) = match self.rank_reports(&mine) {
            Ok(ranks) => (ranks, Ok(())),
            Err(error) => (vec![mine.clone()], Err(error)),
        };
        if self.replicas_agree
            && !self.session.properties.timing_only
            && ranks.iter().any(|rank| rank.weights_hash != hash)
        {
            let hashes: Vec<String> =
                ranks.iter().map(|rank| format!("rank {}: {:.12}", rank.rank, rank.weights_hash)).collect();
            return Err(TrainError::Diverged(hashes.join(", ")));
        }
        let saved = self.write(weights, corpus, steps);
        let history = &mut self.history;
        let summary = Summary {
            steps,
            weights_hash: hash,
            final_loss: history.final_loss(),
            validation_loss: validations.last().map(|(_, loss)| *loss),
            validations,
            skipped_steps: history.skipped,
            tokens_per_s: history.rate(|figures| figures.tokens_per_s),
            step_ms: history.time(|figures| figures.ms),
            parts: mine.parts,
            ranks,
            matrix_share: history.rate(|figures| figures.matrix_share),
            mfu: self.peaks_of_devices.mfu(history.rate(|figures| figures.matrix_share)),
            losses: mem::take(&mut history.losses),
            grad_norms: mem::take(&mut history.grad_norms),
            epochs: mem::take(&mut history.epochs),
            seconds: mem::take(&mut history.seconds),
            matrix_formula: self.peaks_of_devices.matrix_formula(self.local.model.device(), self.config.precision),
            mfu_formula: self.peaks_of_devices.mfu_formula(),
            transport: self.facts(),
            checkpoint: self.keep.model.clone().filter(|_| saved.is_ok()),
            resumed_at: self.keep.resume.as_ref().map(|saved| saved.state().step),
            restarts: self.keep.restarts,
        };
        // A rank that is lost is the cause of the job's end, whatever else went wrong.
        Ok((summary, heard.and(saved)))
    }

    /// Those of all ranks.
    fn rank_reports(&self, mine: &RankReport) -> Result<Vec<RankReport>, TrainError> {
        let blob = serde_json::to_vec(mine)
            .map_err(|error| comm_core::Error::InvalidArgument(format!("a rank's report: {error}")))?;
        let blobs = self.session.control.all_gather("rank reports", &blob, Deadline::after(self.session.timeout))?;
        let reports = blobs.iter().map(|blob| serde_json::from_slice(blob)).collect::<Result<Vec<_>, _>>();
        Ok(reports.map_err(|error| comm_core::Error::Protocol {
            who: "a rank".into(),
            what: format!("its report: {error}"),
        })?)
    }

    /// Saves the masters, on rank 0; all ranks bring theirs.
    pub(super) fn save(&mut self, corpus: &Corpus, step: u64) -> Result<(), TrainError> {
        if !self.saves {
            return Ok(());
        }
        self.apart(|trainer| {
            let mut weights = Vec::new();
            // Where every rank has everything, and all the same, there is nothing to bring.
            if trainer.writes() || !trainer.local.owns_everything() || !trainer.replicas_agree {
                for segment in 0..trainer.local.masters.len() {
                    weights.extend(trainer.masters_on_first(segment)?);
                }
            }
            trainer.write(weights, corpus, step)
        })
    }

    /// Keeps the weights that were saved last under the name of the best, on the rank that saves.
    ///
    /// # Errors
    /// [`CheckpointError::Io`](crate::checkpoint::CheckpointError::Io).
    pub(super) fn keep_best(&self) -> Result<(), CheckpointError> {
        match (&self.keep.model, &self.keep.best) {
            (Some(model), Some(best)) if self.writes() => checkpoint::keep_as(model, best),
            _ => Ok(()),
        }
    }

    /// Whether this rank saves.
    fn writes(&self) -> bool {
        self.keep.model.is_some() && self.session.comm.rank() == SAVES
    }

    /// Writes a checkpoint of these weights, on the rank that saves.
    fn write(&mut self, weights: Vec<Vec<f32>>, corpus: &Corpus, step: u64) -> Result<(), TrainError> {
        let Some(path) = self.keep.model.as_ref().filter(|_| self.writes()) else { return Ok(()) };
        let tokenizer = serde_json::to_value(corpus.tokenizer())
            .map_err(|error| comm_core::Error::Internal(format!("the tokenizer's description: {error}")))?;
        let (config, several_documents) = (self.config.model.clone(), corpus.has_several_documents());
        Checkpoint { config, tokenizer, step, several_documents, weights }.save(path)?;
        if !self.has_companions {
            let folder = path.parent().unwrap_or(Path::new(""));
            save_companions(folder, &self.config.model, Some(corpus.tokenizer()))?;
            self.has_companions = true;
        }
        Ok(())
    }

    /// This rank's masters of one segment, in host memory.
    pub(super) fn own_masters(&self, segment: usize) -> Result<Cow<'_, [f32]>, TrainError> {
        if let Some(weights) = self.local.model.params(segment).filter(|_| self.local.lends_masters) {
            return Ok(Cow::Borrowed(weights));
        }
        Ok(match &self.local.masters[segment] {
            own @ (Flat::Host(_) | Flat::Part(..)) => Cow::Borrowed(own.host()?),
            own @ Flat::Device(_) => Cow::Owned(own.clone().into_host()?),
        })
    }

    /// All masters of one segment, from the ranks that have them.
    fn whole_masters(&self, segment: usize) -> Result<Cow<'_, [f32]>, TrainError> {
        if self.local.owns_everything() {
            return self.own_masters(segment);
        }
        let (own, counts) = self.own_part(segment)?;
        Ok(Cow::Owned(self.local.scalars.all_gather_v(&own, &counts)?))
    }

    /// What this rank brings of one segment's masters, and how many each rank brings: of those that have the same the lowest.
    fn own_part(&self, segment: usize) -> Result<(Cow<'_, [f32]>, Vec<usize>), TrainError> {
        let counts = self.counts(segment)?;
        let is_brought = counts[self.session.comm.rank()] > 0;
        let own = if is_brought { self.own_masters(segment)? } else { Cow::Borrowed(&[][..]) };
        Ok((own, counts))
    }

    /// As [`whole_masters`](Self::whole_masters), on the rank that saves; the others get none. Where ranks have different values of the same
    /// parameters, their mean.
    fn masters_on_first(&self, segment: usize) -> Result<Option<Vec<f32>>, TrainError> {
        if self.local.owns_everything() {
            let own = self.own_masters(segment)?;
            if self.replicas_agree {
                return Ok(self.writes().then(|| own.into_owned()));
            }
            let mut mean = own.into_owned();
            self.local.scalars.reduce(&mut mean, SAVES, ReduceOp::Mean)?;
            return Ok(self.writes().then_some(mean));
        }
        let (own, counts) = self.own_part(segment)?;
        Ok(self.local.scalars.gather_v(&own, &counts, SAVES)?)
    }

    /// How many of a segment's masters each rank brings, which follow one another in the order of ranks.
    fn counts(&self, segment: usize) -> Result<Vec<usize>, TrainError> {
        let mut parts: Vec<(usize, usize)> = self.local.owned_by.iter().map(|rank| rank[segment]).collect();
        for rank in (1..parts.len()).rev() {
            if parts[..rank].contains(&parts[rank]) {
                parts[rank].1 = 0;
            }
        }
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
        Ok(parts.iter().map(|(_, len)| *len).collect())
    }

    /// Whether the masters of this rank that another one has brought into `whole` are the same, to the last bit.
    fn check_own(&self, segment: usize, whole: &[f32]) -> Result<(), TrainError> {
        let rank = self.session.comm.rank();
        let is_brought_by_another =
            !self.session.properties.timing_only && !self.local.owns_everything() && self.counts(segment)?[rank] == 0;
        if !is_brought_by_another || !self.replicas_agree {
            return Ok(());
        }
        let (start, len) = self.local.owned_by[rank][segment];
        let own = self.own_masters(segment)?;
        let theirs = whole.get(start..start + len).unwrap_or_default();
        if own.len() == theirs.len() && own.iter().zip(theirs).all(|(own, theirs)| own.to_bits() == theirs.to_bits()) {
            return Ok(());
        }
        Err(TrainError::Diverged(format!(
            "rank {rank}: its part of segment {segment} is not that of the first rank that has the same part"
        )))
    }

    /// The hash of all masters, after a look whether those that several ranks have are equal, whether this rank's model has the weights that follow from them; and, on the rank that
    /// saves, the masters.
    fn collect(&mut self) -> Result<(String, Vec<Vec<f32>>), TrainError> {
        let mut hash = WeightsHash::default();
        let mut weights = Vec::new();
        let keeps_model = self.local.share.is_some() && !self.strategy.brings_weights();
        for segment in 0..self.local.masters.len() {
            // Where nothing arrives, there are no others' parts.
            let whole = match self.session.properties.timing_only {
                true => self.own_masters(segment)?,
                false => self.whole_masters(segment)?,
            };
            self.check_own(segment, &whole)?;
            hash.add(&whole);
            if keeps_model && !self.session.properties.timing_only {
                let precision = self.config.precision;
                let expected = precision.unpack(precision.pack_into(&whole, 0, whole.len()))?;
                let found = self.local.model.read_params(segment)?;
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

    /// Facts about the transport, and about nodes where the strategy tells them apart.
    fn facts(&self) -> Vec<(String, String)> {
        let mut facts = self.session.properties.settings.clone();
        facts.extend(self.nodes().map(|nodes| (NODES.into(), nodes.to_string())));
        if let Some(node) = &self.session.node {
            facts.push(("ranks of a node".into(), node.size.to_string()));
            let inside = |(name, value): &(String, String)| (format!("inside a node: {name}"), value.clone());
            facts.extend(node.properties.settings.iter().map(inside));
        }
        facts
    }

    fn rank_report(&self, weights_hash: String, usage: Option<Usage>) -> RankReport {
        let steps = self.local.optimizer.steps();
        let history = &self.history;
        let of_gpu = history.steady().filter_map(|figures| figures.gpu_utilization_percent);
        let expected = history.expected();
        RankReport {
            rank: self.session.comm.rank(),
            computes: self.local.share.is_some(),
            bytes_counted: history.payload.mean(),
            bytes_expected: expected.payload,
            bytes_steady: history.is_as_expected,
            scalar_bytes: history.scalars.mean(),
            framing_bytes: history.framing.mean(),
            messages: history.messages.mean(),
            expected,
            node_sent: history.node_payload.mean().zip(history.node_messages.mean()),
            between_nodes: self.session.counts_between_nodes(),
            operations: history.operations.mean().unwrap_or(0),
            optimizer_steps: (steps.iter().min().copied().unwrap_or(0), steps.iter().max().copied().unwrap_or(0)),
            parts: typical_parts(history),
            cpu_utilization: history.rate(|figures| figures.cpu_utilization),
            gpu_utilization: of_gpu.clone().next().map(|_| median(of_gpu)),
            peak_rss_bytes: memory::peak_rss_bytes() / self.session.ranks_in_process as u64,
            memory: usage,
            allocations: history.allocations(),
            staleness: Some(history.staleness).filter(|staleness| staleness.pushes > 0),
            copies: history.copies(),
            weights_hash,
        }
    }
}

fn typical_parts(history: &History) -> Parts {
    let of = |part: fn(&Parts) -> f64| history.time(|figures| part(&figures.parts));
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
