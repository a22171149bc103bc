//! The whole state of a run, written by all ranks together, and read by those of a run that goes on.

use std::borrow::Cow;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use comm_core::control::{ControlExt, MAX_BLOB};
use comm_core::process::StopRequest;
use comm_core::{CommunicatorExt, Deadline, ReduceOp, shard_range};
use serde::{Deserialize, Serialize};

use super::local::Local;
use super::rank::Trainer;
use super::{Observer, TrainConfig, TrainError};
use crate::checkpoint::sharded::{
    Best, Kept, KeptPiece, Kind, PartFile, PartWriter, Piece, Reader, Saved, SavedError, State, Store, Whose,
};
use crate::checkpoint::{InitialWeights, StoredWeights};
use crate::corpus::Corpus;
use crate::devices;
use crate::memory::{self, Category};
use crate::optim::ScalerState;
use crate::strategy::{KeptVector, SavedKept, Strategy};

/// What a run saves and where, from what it goes on, and what asks it to leave.
#[derive(Clone, Debug, Default)]
pub struct Keep {
    /// Where rank 0 saves the weights: at each validation and at the end.
    pub model: Option<PathBuf>,
    /// Where rank 0 keeps those of the best validation so far: another name of what was saved at `model` then.
    pub best: Option<PathBuf>,
    /// Where all ranks save the whole state. The same on all ranks.
    pub checkpoints: Option<Checkpoints>,
    /// From what the run goes on. The same on all ranks.
    pub resume: Option<Arc<Saved>>,
    /// What asks the run to save its state and leave, where it has `checkpoints`. Signals do so from the first step on.
    pub stop: StopRequest,
    /// What has come of earlier attempts.
    pub restarts: Restarts,
}

/// Where and when the whole state is saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoints {
    /// Where: a folder that all ranks share.
    pub store: Store,
    /// After every so many steps; 0 for only when the run is asked to leave. Not after the last step, whose weights are the result. In
    /// `async-ps` all ranks meet for it.
    pub every: u64,
    /// How many are kept, at least 1.
    pub keep: usize,
}

/// Attempts that ended early before this one, for which a launcher has started the ranks again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restarts {
    /// Their number.
    pub count: u64,
    /// Steps that were done in them and had to be done again.
    pub steps_lost: u64,
}

/// A checkpoint that was written.
#[derive(Clone, Debug)]
pub struct SaveReport {
    /// After so many steps.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
    /// Bytes of all files.
    pub bytes: u64,
    /// How long it took, from the first rank that waited for the others to the end.
    pub ms: f64,
    /// The most memory that a process had allocated meanwhile beyond what it had before; `None` without the counting allocator.
    pub extra_bytes: Option<u64>,
    /// Why older ones are still there, if they are.
    pub not_removed: Option<String>,
}

/// How long all ranks of such a run may take to write its state, beside what an operation may take: a second for each 16 MiB of masters and
/// moments, as often as they are written, and as much again where the strategy keeps more.
pub fn writing_time(config: &TrainConfig, ranks: usize) -> Duration {
    let TrainConfig { strategy, options, .. } = config;
    let copies = if options.is_one_device(*strategy) { 1 } else { ranks.saturating_add(1) };
    Duration::from_secs(config.model.parameter_count() as u64 * 12 / (16 << 20) * copies as u64)
}

/// What a rank tells the others of its part.
#[derive(Serialize, Deserialize)]
struct Part {
    file: Option<PartFile>,
    scaler: ScalerState,
    extra_bytes: Option<u64>,
}

impl Trainer<'_> {
    /// Saves the state after `step` steps; all ranks call it together. What the strategy has under way has come then, and is saved. Either
    /// all get a report, or all an error, and what was there before stays.
    ///
    /// # Errors
    /// [`TrainError::Saved`] where it could not be written; any other where the run cannot go on.
    pub(super) fn save_state(
        &mut self,
        checkpoints: &Checkpoints,
        corpus: &Corpus,
        step: u64,
    ) -> Result<SaveReport, TrainError> {
        self.apart(|trainer| {
            let (start, store) = (Instant::now(), &checkpoints.store);
            memory::within(Category::Optimizer, || trainer.strategy.settle())?;
            let is_first = trainer.session.comm.rank() == 0;
            let begun = if is_first { store.begin(step) } else { Ok(()) };
            trainer.all_told(store, step, "begun", begun)?;
            memory::reset_peaks();
            let before = memory::usage().map(|usage| usage.total.current);
            let written = trainer.write_part(store, step);
            let extra_bytes = memory::usage().zip(before).map(|(now, before)| now.total.peak.saturating_sub(before));
            let scaler = trainer.local.scaler.state();
            let parts =
                trainer.all_told(store, step, "written", written.map(|file| Part { file, scaler, extra_bytes }));
            let ended = parts.and_then(|parts| {
                let extra_bytes = parts.iter().filter_map(|part| part.extra_bytes).max();
                let bytes = parts.iter().filter_map(|part| part.file.as_ref()).map(|file| file.bytes).sum();
                let ended = if is_first {
                    trainer.state(corpus, step, parts).and_then(|state| store.commit(&state))
                } else {
                    Ok(())
                };
                trainer.all_told(store, step, "ended", ended)?;
                Ok((bytes, extra_bytes))
            });
            if is_first && ended.is_err() {
                store.discard(step);
            }
            let (bytes, extra_bytes) = ended?;
            let removed = if is_first { store.keep_newest(checkpoints.keep.max(1), None) } else { Ok(()) };
            let not_removed = removed.err().map(|error| error.to_string());
            let (path, ms) = (store.path(step), super::ms(start.elapsed()));
            Ok(SaveReport { step, path, bytes, ms, extra_bytes, not_removed })
        })
    }

    /// Removes, after the last step, checkpoints beyond those that are kept: an earlier run may have been killed between writing one and removing
    /// another, and this one has written none since. The one that this run went on from stays.
    pub(super) fn remove_old(&self, observer: &mut dyn Observer) {
        let saves = self.keep.checkpoints.as_ref().filter(|checkpoints| checkpoints.every > 0);
        let Some(checkpoints) = saves.filter(|_| self.session.comm.rank() == 0) else { return };
        let from = self.keep.resume.as_ref().map(|saved| saved.state().step);
        if let Err(error) = checkpoints.store.keep_newest(checkpoints.keep.max(1), from) {
            observer.warning(&format!("older checkpoints could not be removed: {error}"));
        }
    }

    /// What each rank has come to, once all have; the same error on all where one has failed.
    fn all_told<T: Serialize + serde::de::DeserializeOwned>(
        &self,
        store: &Store,
        step: u64,
        what: &str,
        mine: Result<T, SavedError>,
    ) -> Result<Vec<T>, TrainError> {
        let writing = writing_time(self.config, self.session.comm.world_size());
        let deadline = Deadline::after(self.session.timeout.saturating_add(writing));
        let label = format!("checkpoint {what}");
        let mine = mine.map_err(|error| error.to_string()).and_then(|mine| as_told(&mine));
        let told = self.session.control.gather(&label, &mine, deadline)?;
        let told = told.into_iter().enumerate().map(|(rank, told): (usize, Result<String, String>)| {
            let told = told.and_then(|told| serde_json::from_str(&told).map_err(|error| error.to_string()));
            told.map_err(|why| SavedError::NotWritten { path: store.path(step), rank, why })
        });
        Ok(told.collect::<Result<_, _>>()?)
    }

    /// Writes this rank's file, if it has anything to write: straight from where the values are.
    fn write_part(&self, store: &Store, step: u64) -> Result<Option<PartFile>, SavedError> {
        let (rank, segments) = (self.session.comm.rank(), self.local.model.segments());
        let steps = self.local.optimizer.steps();
        let ranges = if self.own_values {
            segments.iter().map(|info| 0..info.len).collect()
        } else {
            ranges_to_write(&self.local.owned_by, rank)
        };
        let ranges: Vec<(usize, Range<usize>)> =
            ranges.into_iter().enumerate().filter(|(_, range)| !range.is_empty()).collect();
        let piece = |(segment, range): &(usize, Range<usize>)| Piece {
            segment: segments[*segment].name.clone(),
            start: range.start,
            len: range.len(),
            optimizer_steps: steps[*segment],
        };
        let pieces: Vec<Piece> = ranges.iter().map(piece).collect();
        let kept = self.kept_parts();
        let piece = |(vector, part): &(KeptVector<'_>, Range<usize>)| KeptPiece {
            what: vector.what,
            segment: segments[vector.segment].name.clone(),
            start: vector.start + part.start,
            len: part.len(),
        };
        let kept_pieces: Vec<KeptPiece> = kept.iter().map(piece).collect();
        if pieces.is_empty() && kept.is_empty() {
            return Ok(None);
        }
        let kinds = Kind::of(self.config.optimizer.kind);
        let (path, name) = store.part(step, rank);
        let failed = |source| SavedError::Io { path: path.clone(), what: "cannot write it (disk full?)", source };
        let from_device = |error: TrainError| failed(std::io::Error::other(error.to_string()));
        let mut file = PartWriter::create(&path, &PartFile::tensors(&pieces, &kept_pieces, kinds)).map_err(failed)?;
        for (segment, range) in ranges {
            let first = self.local.owned_by[rank][segment].0;
            let own = range.start - first..range.end - first;
            file.values(&self.own_masters(segment).map_err(from_device)?[own.clone()]).map_err(failed)?;
            let means = self.local.optimizer.state(segment).map_err(from_device)?;
            means
                .iter()
                .take(kinds.len() - 1)
                .try_for_each(|means| file.values(&means[own.clone()]))
                .map_err(failed)?;
        }
        for (vector, part) in &kept {
            let values = vector.values.part(part.clone()).map_err(|error| from_device(error.into()))?;
            file.values(&values).map_err(failed)?;
        }
        let (bytes, sha256) = file.finish().map_err(failed)?;
        let has_own = self.own_values || kept.iter().any(|(vector, _)| vector.what == Kept::Left);
        Ok(Some(PartFile { name, bytes, sha256, rank: has_own.then_some(rank), pieces, kept: kept_pieces }))
    }

    /// What the strategy keeps, and the part of each that this rank writes.
    fn kept_parts(&self) -> Vec<(KeptVector<'_>, Range<usize>)> {
        let (rank, ranks) = (self.session.comm.rank(), self.session.comm.world_size());
        let mut parts = Vec::new();
        for vector in self.strategy.kept() {
            let len = vector.values.len();
            let part = if vector.what.is_shared() { shard_range(len, ranks, rank) } else { 0..len };
            if !part.is_empty() {
                parts.push((vector, part));
            }
        }
        parts
    }

    fn state(&self, corpus: &Corpus, step: u64, parts: Vec<Part>) -> Result<State, SavedError> {
        let json = |what: &'static str, value: serde_json::Result<serde_json::Value>| {
            value.map_err(|error| SavedError::Io {
                path: what.into(),
                what: "cannot be described",
                source: error.into(),
            })
        };
        let steps_per_epoch = self.local.batches.steps_per_epoch() as u64;
        Ok(State {
            step,
            epoch: step / steps_per_epoch + 1,
            step_of_epoch: step % steps_per_epoch,
            config: json("the configuration", serde_json::to_value(self.config))?,
            ranks: self.session.comm.world_size(),
            transport: self.session.properties.transport.name().to_owned(),
            device: Some(devices::kind(self.local.model.device()).to_owned()),
            text: corpus.describe(),
            text_sha256: corpus.hash_hex(),
            tokenizer: json("the tokenizer", serde_json::to_value(corpus.tokenizer()))?,
            scaler: self.local.scaler.state(),
            scalers: if self.own_values { parts.iter().map(|part| part.scaler).collect() } else { Vec::new() },
            best: self.best,
            replicas: self.own_values,
            files: parts.into_iter().filter_map(|part| part.file).collect(),
        })
    }

    /// Whether all ranks leave now, since one was asked to: known from the step's scalars, or, where a strategy has no step in which all
    /// ranks look at the same, asked for after one in which they have met, or after which they do: `meets`, for a validation or a checkpoint.
    pub(super) fn leaves(&mut self, meets: bool) -> Result<bool, TrainError> {
        match self.local.leaving.take() {
            Some(leaving) => Ok(leaving),
            None if (self.have_met || meets) && self.keep.checkpoints.is_some() => {
                let asked = i64::from(self.keep.stop.is_asked());
                Ok(self.local.scalars.all_reduce_scalar(asked, ReduceOp::Max)? == 1)
            }
            None => Ok(false),
        }
    }

    /// A validation, if none before was as good.
    pub(super) fn if_best(&self, step: u64, loss: f64) -> Option<Best> {
        (loss.is_finite() && self.best.is_none_or(|best| loss < best.loss)).then_some(Best { step, loss })
    }
}

/// What a rank tells the others of what it has come to, as JSON, since fields that say nothing are left out of a part; or why it cannot be told.
fn as_told(mine: &impl Serialize) -> Result<String, String> {
    /// What the message has besides.
    const ENVELOPE: usize = 64;
    let json = serde_json::to_string(mine).map_err(|error| error.to_string())?;
    if json.len() > MAX_BLOB - ENVELOPE {
        return Err(format!("the list of written files has {} bytes, and at most {MAX_BLOB} are possible", json.len()));
    }
    Ok(json)
}

/// What each rank writes of each segment: ranks that own the same range of one share it evenly, so that every element is written once and
/// no rank writes much more than another.
fn ranges_to_write(owned_by: &[Vec<(usize, usize)>], rank: usize) -> Vec<Range<usize>> {
    let of_segment = |(segment, own): (usize, &(usize, usize))| {
        let (start, len) = *own;
        let same: Vec<usize> = (0..owned_by.len()).filter(|other| owned_by[*other][segment] == *own).collect();
        let place = same.iter().position(|other| *other == rank).unwrap_or(0);
        let part = shard_range(len, same.len().max(1), place);
        start + part.start..start + part.end
    };
    owned_by[rank].iter().enumerate().map(of_segment).collect()
}

/// Where the values of a run that begins come from.
pub(super) enum Start<'a> {
    /// The seed.
    Seed,
    /// The weights of another run or program; the optimizer begins anew.
    Weights(StoredWeights),
    /// A checkpoint of the whole state.
    Saved(Reader<'a>),
}

impl<'a> Start<'a> {
    /// Of `rank`, of `ranks`, of a run that is to go on from `saved`, if from any, and otherwise begins as its settings say.
    ///
    /// # Errors
    /// The weights to start from are not there, or not of the run's model.
    pub(super) fn of(
        saved: Option<&'a Saved>,
        config: &TrainConfig,
        (rank, ranks): (usize, usize),
    ) -> Result<Self, TrainError> {
        Ok(match (saved, &config.initial) {
            (Some(saved), _) => Start::Saved(reader(saved, config, (rank, ranks))?),
            (None, Some(initial)) => Start::Weights(weights(config, initial)?),
            (None, None) => Start::Seed,
        })
    }
}

/// Reads what `rank`, of `ranks`, goes on with.
fn reader<'a>(saved: &'a Saved, config: &TrainConfig, (rank, ranks): (usize, usize)) -> Result<Reader<'a>, SavedError> {
    let config = serde_json::to_value(config).map_err(|error| SavedError::Io {
        path: saved.folder().into(),
        what: "the configuration cannot be compared with it",
        source: error.into(),
    })?;
    Ok(Reader::new(saved, saved.state().whose(&config, rank, ranks)))
}

/// The weights to start from, which are to be of the run's model.
fn weights(config: &TrainConfig, initial: &InitialWeights) -> Result<StoredWeights, TrainError> {
    let stored = StoredWeights::open(&initial.path)?.with_block_size(config.model.block_size)?;
    if *stored.config() != config.model {
        return Err(comm_core::Error::invalid(format!(
            "the weights in {} are of a model of another shape: {:?} instead of {:?}",
            initial.path.display(),
            stored.config(),
            config.model
        ))
        .into());
    }
    Ok(stored)
}

/// Has the strategy of a rank, `local`, go on with what it has kept in a checkpoint.
///
/// # Errors
/// Those of [`Reader::kept`], and the strategy's.
pub(super) fn restore_strategy(
    strategy: &mut dyn Strategy,
    local: &Local<'_>,
    saved: &Saved,
) -> Result<(), TrainError> {
    let of = (local.scalars.rank(), local.scalars.world_size());
    let mut reader = reader(saved, local.config, of)?;
    let place = |values: Vec<f32>| local.places.masters(values, local.model.device());
    let is_mean = reader.whose() == Whose::Mean;
    let read = &mut |segment: usize, what: Kept, range: Range<usize>| {
        reader.kept(segment, what, range).map_err(TrainError::from)
    };
    memory::within(Category::Optimizer, || strategy.restore(&mut SavedKept { read, is_mean, place: &place }))
}

/// Gives a rank, of a run whose ranks have values of their own or not, what is not sharded of a checkpoint.
///
/// # Errors
/// [`TrainError::Scaling`], and [`SavedError::Foreign`] where the step is at another place in the data than it was.
pub(super) fn restore_rest(local: &mut Local<'_>, own_values: bool, saved: &Saved) -> Result<(), TrainError> {
    let state = saved.state();
    let restored = local.scaler.restore(state.scaler_of(local.scalars.rank(), own_values));
    restored.map_err(|error| TrainError::Scaling { step: state.step, error })?;
    let steps_per_epoch = local.batches.steps_per_epoch() as u64;
    let place = (state.step / steps_per_epoch + 1, state.step % steps_per_epoch);
    if place != (state.epoch, state.step_of_epoch) || state.step > local.config.steps {
        let detail = format!(
            "its step {} is step {} of epoch {} there, and step {} of epoch {} here, of {} steps",
            state.step, state.step_of_epoch, state.epoch, place.1, place.0, local.config.steps
        );
        return Err(SavedError::Foreign { path: saved.folder().into(), detail }.into());
    }
    Ok(())
}

/// Both moments of an optimizer, in host memory.
pub(super) type Means<'a> = [Cow<'a, [f32]>; 2];

/// What a run that was asked to leave ends with.
pub(super) fn stopped(report: &SaveReport) -> TrainError {
    TrainError::Stopped { step: report.step, path: report.path.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_that_is_too_long_to_be_told_is_an_error_of_its_rank() {
        let told = |len: usize| as_told(&"n".repeat(len));
        assert!(told(MAX_BLOB).unwrap_err().contains("has 1048578 bytes"));
        // What can be told can be gathered.
        let longest = told(MAX_BLOB - 66).unwrap();
        let alone = comm_core::local::group(1, 1).remove(0);
        let mine: Result<String, String> = Ok(longest);
        let deadline = Deadline::after(Duration::from_secs(30));
        assert_eq!(alone.control.gather("parts", &mine, deadline).unwrap(), [mine]);
    }

    #[test]
    fn every_element_is_written_once_whoever_owns_it() {
        // Of one segment of ten elements: replicas, one owner, shards, replicas of shards.
        for owned in [
            vec![(0, 10), (0, 10), (0, 10)],
            vec![(0, 10), (0, 0), (0, 0)],
            vec![(0, 4), (4, 3), (7, 3)],
            vec![(0, 5), (5, 5), (0, 5), (5, 5)],
            vec![(0, 10)],
        ] {
            let owned_by: Vec<Vec<(usize, usize)>> = owned.iter().map(|own| vec![*own]).collect();
            let mut written = vec![0; 10];
            for (rank, (start, len)) in owned.iter().enumerate() {
                let range = ranges_to_write(&owned_by, rank).remove(0);
                assert!(range.is_empty() || (*start <= range.start && range.end <= start + len), "{owned:?}");
                range.for_each(|element| written[element] += 1);
            }
            assert_eq!(written, [1; 10], "{owned:?}");
        }
    }
}
