//! The whole state of a run after a step, from which it goes on: a folder that all ranks write together, each what it owns.
//!
//! `step-N` holds `run.json`, and a file in the safetensors format of each rank that has something to write, `rank-R.safetensors`: for each
//! range of a segment its masters and the moments of its optimizer, all f32, and what else the strategy keeps from step to step ([`Kept`]). No
//! rank ever has more of the model in memory than it had before, neither when it saves nor when it goes on. `run.json` says which file has
//! which range, how long each file is and what its SHA-256 is, and has all that is not sharded: the step, which is the place in the data too
//! (their order is a pure function of seed and step), the settings, the loss scaler, the hash of the text.
//!
//! With S elements of the model, N ranks, and M moments of the optimizer (two; of SGD none), the values that a rank writes are 4 bytes times
//!
//! | strategy | elements |
//! |---|---|
//! | those that average gradients in every step, `single` | (1+M)·S/N; what only some of the ranks have, S over their number |
//! | the same, compressed | and S of what is left of its own gradients, of `powersgd:r` of matrices alone; of `int8` and `sign` S/N of their mean; of `ps` S on each worker; of `powersgd:r` r·columns/N of each matrix |
//! | `async-ps` | (1+M)·S on the server |
//! | `local-sgd`, `sparta` | (1+M)·S; of `local-sgd` with a 16-bit wire S/N more |
//! | `diloco`, `streaming-diloco` | (1+M)·S; S/N more, and as much for each segment with momentum of the outer optimizer, and for each whose average is under way |
//!
//! The folder is written under another name, and gets its own when everything in it is on disk: a folder of that name is whole.

mod kept;
mod part;
mod reader;
mod store;

use std::fs;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::build;
use crate::config::ModelConfig;
use crate::optim::{OptimizerKind, ScalerState};
use crate::segments::{SegmentInfo, layout};

use kept::KeptIndex;
pub use kept::{Kept, KeptPiece};
pub(crate) use part::PartWriter;
pub use reader::{Reader, Whose};
pub use store::{STATE, Store};

/// What `run.json` says in its `format`.
const FORMAT: &str = "isocomm gpt2 checkpoint";

/// The version of the format that is written, and the newest that is read.
pub const VERSION: u64 = 3;

/// Longest `run.json` that is read: ranges of a thousand segments on thousands of ranks.
const MAX_STATE: u64 = 256 << 20;

/// What a range has of each element: its master, and the running means of its gradient and of the gradient's square.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The f32 parameter.
    Master,
    /// The first moment.
    Mean,
    /// The second moment.
    Square,
}

impl Kind {
    /// All of them, in the order in which they are written.
    pub const ALL: [Kind; 3] = [Kind::Master, Kind::Mean, Kind::Square];

    /// Those of a run with this optimizer.
    pub fn of(optimizer: OptimizerKind) -> &'static [Kind] {
        if optimizer.has_moments() { &Kind::ALL } else { &[Kind::Master] }
    }

    fn name(self) -> &'static str {
        match self {
            Kind::Master => "master",
            Kind::Mean => "mean",
            Kind::Square => "square",
        }
    }
}

/// A range of a segment that one rank writes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Piece {
    /// The segment's name (see [`layout`]).
    pub segment: String,
    /// First element.
    pub start: usize,
    /// Number of elements, at least 1.
    pub len: usize,
    /// Steps that its optimizer has taken.
    pub optimizer_steps: u64,
}

impl Piece {
    fn range(&self) -> Range<usize> {
        self.start..self.start.saturating_add(self.len)
    }
}

/// A rank's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartFile {
    /// Its name in the folder.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// Its SHA-256, in hexadecimal.
    pub sha256: String,
    /// The rank whose own values it holds, where ranks have values of their own of the same elements.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
    /// What it holds.
    pub pieces: Vec<Piece>,
    /// And of what else the strategy keeps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept: Vec<KeptPiece>,
}

impl PartFile {
    /// The names of its tensors and their lengths, in the order in which they are written, of a run with values of these kinds.
    pub(crate) fn tensors(pieces: &[Piece], kept: &[KeptPiece], kinds: &[Kind]) -> Vec<(String, usize)> {
        let of_piece = |piece: &Piece| {
            let name = |kind: &Kind| (tensor(&piece.segment, piece.start, kind.name()), piece.len);
            kinds.iter().map(name).collect::<Vec<_>>()
        };
        let of_kept = |piece: &KeptPiece| (tensor(&piece.segment, piece.start, piece.what.name()), piece.len);
        pieces.iter().flat_map(of_piece).chain(kept.iter().map(of_kept)).collect()
    }
}

/// What a tensor is called in a rank's file.
fn tensor(segment: &str, start: usize, what: &str) -> String {
    format!("{segment}.{start}.{what}")
}

/// The best validation so far.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    /// After so many steps.
    pub step: u64,
    /// Its loss.
    pub loss: f64,
}

/// What a checkpoint has besides what is sharded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Steps taken.
    pub step: u64,
    /// Epoch of the next step, from 1.
    pub epoch: u64,
    /// The next step in that epoch, from 0.
    pub step_of_epoch: u64,
    /// Every setting of the run: a [`TrainConfig`](crate::trainer::TrainConfig).
    pub config: Value,
    /// Number of ranks.
    pub ranks: usize,
    /// The transport between them.
    pub transport: String,
    /// The kind of device that computed; version 1 of the format did not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// What the text was.
    pub text: String,
    /// Its hash ([`Corpus::hash_hex`](crate::corpus::Corpus::hash_hex)).
    pub text_sha256: String,
    /// The tokenizer's description.
    pub tokenizer: Value,
    /// The loss scaler; where each rank has its own, that of rank 0.
    pub scaler: ScalerState,
    /// Those of all ranks, where each has its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scalers: Vec<ScalerState>,
    /// The best validation, if there was one.
    pub best: Option<Best>,
    /// Whether each rank has trained by itself: its file has every element of every segment, as it is on that rank.
    #[serde(default, skip_serializing_if = "is_not")]
    pub replicas: bool,
    /// The ranks' files. Where they are not of [`replicas`](State::replicas), they have every element of every segment once together.
    pub files: Vec<PartFile>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_not(value: &bool) -> bool {
    !*value
}

/// `run.json`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StateFile<S> {
    format: String,
    version: u64,
    program: String,
    /// The commit that the program was built from, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    commit: Option<String>,
    /// Of the state, as it is written without white space.
    sha256: String,
    state: S,
}

/// What can be read of `run.json` in any version.
#[derive(Deserialize)]
struct Head {
    format: String,
    version: u64,
    program: String,
}

impl State {
    /// What `run.json` says.
    fn to_file(&self) -> serde_json::Result<Vec<u8>> {
        let (format, program) = (FORMAT.into(), concat!("gpt2 ", env!("CARGO_PKG_VERSION")).into());
        let commit = build::COMMIT.map(str::to_owned);
        let file = StateFile { format, version: VERSION, program, commit, sha256: self.sha256()?, state: self };
        serde_json::to_vec_pretty(&file)
    }

    fn sha256(&self) -> serde_json::Result<String> {
        Ok(comm_core::hex(&Sha256::digest(serde_json::to_vec(self)?)))
    }

    /// Settings that a run which goes on from this must have, and which are others in `config` or in the text with this hash; each as a user
    /// reads it.
    pub fn contradictions(&self, config: &Value, text_sha256: &str) -> Vec<String> {
        let empty = serde_json::Map::new();
        let (then, now) = (self.config.as_object().unwrap_or(&empty), config.as_object().unwrap_or(&empty));
        let mut names: Vec<&String> = then.keys().chain(now.keys()).collect();
        names.sort_unstable();
        names.dedup();
        let mut found = Vec::new();
        for name in names.into_iter().filter(|name| !MAY_CHANGE.contains(&name.as_str())) {
            let (mut then, mut now) = (then.get(name).unwrap_or(&Value::Null), now.get(name).unwrap_or(&Value::Null));
            if name == INITIAL {
                // The same weights may lie in another place.
                (then, now) = (&then["hash"], &now["hash"]);
            }
            if then != now {
                found.push(format!("{}: {}", option(name), difference(then, now)));
            }
        }
        if self.text_sha256 != text_sha256 {
            found.push(format!(
                "--data, --tokenizer: the text's hash was {:.12} and is {text_sha256:.12} now",
                self.text_sha256
            ));
        }
        found
    }

    /// Whether a run of so many ranks with this configuration has ranks that may go on each with what one of these had by itself.
    fn is_of_same_ranks(&self, config: &Value, ranks: usize) -> bool {
        self.ranks == ranks && ["strategy", "options"].iter().all(|name| self.config[name] == config[name])
    }

    /// Whose values `rank`, of `ranks`, of a run with this configuration goes on with, where the ranks of this one had values of their own.
    pub fn whose(&self, config: &Value, rank: usize, ranks: usize) -> Whose {
        if self.is_of_same_ranks(config, ranks) { Whose::Rank(rank) } else { Whose::Mean }
    }

    /// Ranks whose gradients a step averaged.
    fn averaged(&self) -> usize {
        let serves = self.config["strategy"] == "ps" && self.config["options"]["dedicated_server"] == true;
        self.ranks - usize::from(serves && self.ranks > 1)
    }

    /// The loss scaler that `rank` goes on with: its own where ranks of the run that goes on have values of their own, and otherwise, since all
    /// must have the same, the one with the smallest scale.
    pub fn scaler_of(&self, rank: usize, own_values: bool) -> &ScalerState {
        let found = if own_values {
            self.scalers.get(rank % self.scalers.len().max(1))
        } else {
            self.scalers.iter().min_by(|a, b| a.scale.total_cmp(&b.scale))
        };
        found.unwrap_or(&self.scaler)
    }

    /// Settings that may be others and are, of those from which the last bits of results depend, and what comes of it.
    pub fn changes(&self, config: &Value, ranks: usize) -> Vec<String> {
        let mut found = Vec::new();
        if self.ranks != ranks {
            found.push(format!("there were {} rank(s) and are {ranks} now", self.ranks));
        }
        for name in ["strategy", "options", "precision", "loss_scaling", "accumulation"] {
            let (then, now) = (&self.config[name], &config[name]);
            if then != now {
                found.push(format!("{}: {}", option(name), difference(then, now)));
            }
        }
        if !self.is_of_same_ranks(config, ranks) {
            found.extend(
                self.replicas.then(|| "each rank had parameters of its own, and all continue with their mean".into()),
            );
            let has_left = self.files.iter().flat_map(|file| &file.kept).any(|piece| piece.what == Kept::Left);
            let drops = config["options"]["compress"].as_str().is_none_or(|now| now == "none");
            found.extend(has_left.then(|| match drops {
                true => "what compression had left out of gradients is dropped".into(),
                false => "what compression had left out of the ranks' gradients is divided among the ranks".into(),
            }));
        }
        found
    }
}

/// Settings that a run may have others of than the one it goes on from.
const MAY_CHANGE: [&str; 8] =
    ["strategy", "options", "precision", "recompute", "loss_scaling", "accumulation", "eval_every", "eval_batches"];

/// The setting that names the weights that a run began with.
const INITIAL: &str = "initial";

/// The options by which a user gives a setting.
fn option(name: &str) -> String {
    match name {
        "model" => "--preset, --block-size, --tokenizer".into(),
        INITIAL => "--init-from, hash of the weights".into(),
        "global_batch" => "--batch".into(),
        "learning_rate" => "--lr, --min-lr, --warmup, --schedule, --steps".into(),
        "optimizer" => "--optimizer and its constants".into(),
        "options" => "options of the strategy".into(),
        "loss_scaling" => "--loss-scale".into(),
        other => format!("--{}", other.replace('_', "-")),
    }
}

/// How two values differ: field by field where both have fields.
fn difference(then: &Value, now: &Value) -> String {
    match (then, now) {
        (Value::Object(a), Value::Object(b)) if a.keys().eq(b.keys()) => {
            let fields = a.iter().zip(b.values()).filter(|((_, a), b)| a != b);
            let fields: Vec<String> = fields.map(|((name, a), b)| format!("{name} was {a} and is {b} now")).collect();
            fields.join(", ")
        }
        (then, now) => format!("was {then} and is {now} now"),
    }
}

/// What is wrong with a checkpoint, or went wrong with one.
#[derive(Debug, thiserror::Error)]
pub enum SavedError {
    /// The file system refused.
    #[error("checkpoint {}: {what}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// There is none.
    #[error("{}: {detail}", path.display())]
    Absent {
        /// Where one was looked for.
        path: PathBuf,
        /// What is there instead, and what to do.
        detail: String,
    },
    /// Something else.
    #[error("checkpoint {}: {detail}; is it a checkpoint that `gpt2 train --save-every` wrote?", path.display())]
    Foreign {
        /// The folder.
        path: PathBuf,
        /// What is missing or unexpected.
        detail: String,
    },
    /// One of a later program.
    #[error(
        "checkpoint {}: it has version {version} of the format, written by {program}; this program reads versions up to {newest}: continue \
         with that program or a later one", path.display(), newest = VERSION
    )]
    Newer {
        /// The folder.
        path: PathBuf,
        /// Its version.
        version: u64,
        /// What wrote it.
        program: String,
    },
    /// A file is not what was written.
    #[error("checkpoint {}: {file} {detail}: it was cut off, changed or damaged after it was written; continue from another \
        checkpoint", path.display())]
    Altered {
        /// The folder.
        path: PathBuf,
        /// The file.
        file: String,
        /// What it has, and what it should have.
        detail: String,
    },
    /// The run that is to go on is another one.
    #[error(
        "checkpoint {}: it belongs to a run with other settings: {}; give the settings of that run, or begin a new run without \
         --resume", path.display(), what.join("; ")
    )]
    Contradicts {
        /// The folder.
        path: PathBuf,
        /// Each setting, then and now.
        what: Vec<String>,
    },
    /// A rank could not write its part, so none is there.
    #[error("checkpoint {}: rank {rank}: {why}", path.display())]
    NotWritten {
        /// Where it was to be.
        path: PathBuf,
        /// The rank.
        rank: usize,
        /// Its reason.
        why: String,
    },
}

/// The ranges of each segment, by their first element, and the file of each.
type Index = Vec<Vec<(Range<usize>, usize)>>;

/// A checkpoint that is there.
#[derive(Clone, Debug)]
pub struct Saved {
    folder: PathBuf,
    state: State,
    digest: String,
    /// One; of replicas one for each rank.
    indices: Vec<Index>,
    kept: KeptIndex,
    kinds: &'static [Kind],
    segments: Vec<SegmentInfo>,
}

impl Saved {
    /// Reads what is not sharded, and looks whether all files are there, with the right length; what is in them is read later:
    /// [`verify`](Saved::verify), [`Reader`].
    ///
    /// # Errors
    /// All of [`SavedError`] but the last two.
    pub fn open(folder: &Path) -> Result<Self, SavedError> {
        let path = folder.join(STATE);
        let cannot_read = |source| SavedError::Io { path: path.clone(), what: "cannot read it", source };
        let foreign = |detail: String| SavedError::Foreign { path: folder.into(), detail };
        let unreadable = |error: serde_json::Error| foreign(format!("its {STATE} is unreadable: {error}"));
        match fs::metadata(&path) {
            Ok(found) if found.is_file() && found.len() <= MAX_STATE => {}
            Ok(_) => {
                return Err(foreign(format!("its {STATE} is not a regular file of at most {} MiB", MAX_STATE >> 20)));
            }
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                return Err(foreign(format!("there is no {STATE} in it")));
            }
            Err(error) => return Err(cannot_read(error)),
        }
        let bytes = fs::read(&path).map_err(cannot_read)?;
        let head: Head = serde_json::from_slice(&bytes).map_err(unreadable)?;
        if head.format != FORMAT || head.version == 0 {
            return Err(foreign(format!("its {STATE} is of format {:?}, version {}", head.format, head.version)));
        }
        if head.version > VERSION {
            return Err(SavedError::Newer { path: folder.into(), version: head.version, program: head.program });
        }
        let StateFile { state, sha256, .. } = serde_json::from_slice::<StateFile<State>>(&bytes).map_err(unreadable)?;
        if state.sha256().map_err(unreadable)? != sha256 {
            let detail = "does not match the hash that is stored in it".to_owned();
            return Err(SavedError::Altered { path: folder.into(), file: STATE.into(), detail });
        }
        let digest = comm_core::hex(&Sha256::digest(&bytes));
        let config: ModelConfig = serde_json::from_value(state.config["model"].clone()).map_err(unreadable)?;
        let segments = layout(&config).map_err(|error| foreign(error.to_string()))?;
        // Every run says it.
        let optimizer = state.config["optimizer"].get("kind").map(OptimizerKind::deserialize).transpose();
        let kinds = Kind::of(optimizer.map_err(unreadable)?.unwrap_or_default());
        let indices = indices(&segments, &state).map_err(foreign)?;
        let kept = KeptIndex::new(&segments, &state).map_err(foreign)?;
        let saved = Saved { folder: folder.into(), state, digest, indices, kept, kinds, segments };
        saved.state.files.iter().try_for_each(|file| saved.check_length(file))?;
        Ok(saved)
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What is not sharded.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// SHA-256 of `run.json`, and with it of everything: equal for equal checkpoints alone.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Whether a run with this configuration and text may go on from it.
    ///
    /// # Errors
    /// [`SavedError::Contradicts`].
    pub fn check(&self, config: &Value, text_sha256: &str) -> Result<(), SavedError> {
        let what = self.state.contradictions(config, text_sha256);
        if what.is_empty() { Ok(()) } else { Err(SavedError::Contradicts { path: self.folder.clone(), what }) }
    }

    /// Reads rank `rank`'s part of all files, of `ranks`, and compares their hashes: each file is read by one rank.
    ///
    /// # Errors
    /// [`SavedError::Altered`], [`SavedError::Io`].
    pub fn verify(&self, rank: usize, ranks: usize) -> Result<(), SavedError> {
        for file in self.state.files.iter().skip(rank).step_by(ranks.max(1)) {
            self.check_length(file)?;
            let path = self.folder.join(&file.name);
            let found =
                part::sha256(&path).map_err(|source| SavedError::Io { path, what: "cannot read it", source })?;
            if found != file.sha256 {
                let detail = format!("has SHA-256 {found:.12}… instead of {:.12}…", file.sha256);
                return Err(self.altered(file, detail));
            }
        }
        Ok(())
    }

    fn check_length(&self, file: &PartFile) -> Result<(), SavedError> {
        match fs::metadata(self.folder.join(&file.name)) {
            Ok(found) if !found.is_file() => Err(self.altered(file, "is not a file".into())),
            Ok(found) if found.len() != file.bytes => {
                Err(self.altered(file, format!("has {} bytes instead of {}", found.len(), file.bytes)))
            }
            Ok(_) => Ok(()),
            Err(error) => Err(self.altered(file, format!("cannot be found ({error})"))),
        }
    }

    fn altered(&self, file: &PartFile, detail: String) -> SavedError {
        SavedError::Altered { path: self.folder.clone(), file: file.name.clone(), detail }
    }
}

/// Where the ranges of each segment are; of replicas those of each rank by themselves.
///
/// # Errors
/// Those of [`index`]; of replicas also that a rank's is not there.
fn indices(segments: &[SegmentInfo], state: &State) -> Result<Vec<Index>, String> {
    let files = || state.files.iter().enumerate();
    if !state.replicas {
        return Ok(vec![index(segments, files())?]);
    }
    let of_rank = |rank: usize| {
        let own = files().filter(|(_, file)| file.rank == Some(rank));
        index(segments, own).map_err(|error| format!("of rank {rank}: {error}"))
    };
    // As many as are said before any is looked for: each has a file.
    if state.files.len() != state.ranks {
        return Err(format!("it has {} files of {} ranks", state.files.len(), state.ranks));
    }
    (0..state.ranks).map(of_rank).collect()
}

/// Where the ranges of each segment are, of these files with their numbers.
///
/// # Errors
/// Which segment has elements that are nowhere or in two places, or whose optimizers have taken different numbers of steps; or a file with a
/// name that is none.
fn index<'a>(segments: &[SegmentInfo], files: impl Iterator<Item = (usize, &'a PartFile)>) -> Result<Index, String> {
    let mut index: Index = vec![Vec::new(); segments.len()];
    let mut steps = vec![None; segments.len()];
    for (number, file) in files {
        if Path::new(&file.name).file_name().is_none_or(|name| *name != *file.name) {
            return Err(format!("{:?} is not the name of a file in it", file.name));
        }
        for piece in &file.pieces {
            let segment = segments.iter().position(|info| info.name == piece.segment);
            let segment = segment.ok_or_else(|| format!("its model has no segment {:?}", piece.segment))?;
            index[segment].push((piece.range(), number));
            if *steps[segment].get_or_insert(piece.optimizer_steps) != piece.optimizer_steps {
                return Err(format!("parts of segment {:?} are from different steps", piece.segment));
            }
        }
    }
    for (info, ranges) in segments.iter().zip(&mut index) {
        ranges.sort_unstable_by_key(|(range, _)| range.start);
        let end =
            ranges.iter().try_fold(0, |end, (range, _)| (range.start == end && !range.is_empty()).then_some(range.end));
        if end != Some(info.len) {
            return Err(format!("its files do not have every element of segment {:?} once", info.name));
        }
    }
    Ok(index)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::{LossScaler, LossScaling};

    const SHAPE: ModelConfig = ModelConfig { n_layer: 1, n_head: 1, n_embd: 2, block_size: 3, vocab_size: 5 };

    /// The value of an element, another for each.
    fn value(segment: usize, kind: Kind, element: usize) -> f32 {
        (1000 * segment + 100_000 * kind as usize + element) as f32
    }

    /// A checkpoint of two ranks that cut each segment at a third, the second first.
    fn saved(store: &Store) -> State {
        store.begin(7).unwrap();
        let segments = layout(&SHAPE).unwrap();
        let files = [1, 0].map(|rank| {
            let piece = |info: &SegmentInfo| {
                let (start, end) = if rank == 0 { (0, info.len / 3) } else { (info.len / 3, info.len) };
                Piece { segment: info.name.clone(), start, len: end - start, optimizer_steps: 6 }
            };
            let pieces: Vec<Piece> = segments.iter().map(piece).collect();
            let (path, name) = store.part(7, rank);
            let mut file = PartWriter::create(&path, &PartFile::tensors(&pieces, &[], &Kind::ALL)).unwrap();
            for (segment, piece) in pieces.iter().enumerate() {
                for kind in Kind::ALL {
                    let values: Vec<f32> = piece.range().map(|element| value(segment, kind, element)).collect();
                    file.values(&values).unwrap();
                }
            }
            let (bytes, sha256) = file.finish().unwrap();
            PartFile { name, bytes, sha256, rank: None, pieces, kept: Vec::new() }
        });
        State {
            step: 7,
            epoch: 1,
            step_of_epoch: 7,
            config: serde_json::json!({"model": SHAPE, "seed": 3, "strategy": "ddp"}),
            ranks: 2,
            transport: "tcp".into(),
            device: Some("cpu".into()),
            text: "some".into(),
            text_sha256: "ab".into(),
            tokenizer: Value::Null,
            scaler: LossScaler::new(LossScaling::DYNAMIC).unwrap().state(),
            scalers: Vec::new(),
            best: Some(Best { step: 5, loss: 0.1 }),
            replicas: false,
            files: files.into(),
        }
    }

    #[test]
    fn any_range_is_read_from_whichever_files_have_it() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path().join("checkpoints"));
        let state = saved(&store);
        assert_eq!(store.latest(), None, "it is not whole");
        store.commit(&state).unwrap();
        let saved = Saved::open(&store.latest().unwrap()).unwrap();
        assert_eq!(saved.state(), &state);
        (0..3).for_each(|rank| saved.verify(rank, 3).unwrap());
        let mut reader = Reader::new(&saved, Whose::Mean);
        assert_eq!(reader.optimizer_steps(2), 6);
        for (segment, info) in layout(&SHAPE).unwrap().iter().enumerate() {
            for range in [0..info.len, 0..1, info.len / 3 - 1..info.len / 3 + 1, info.len - 1..info.len, 1..1] {
                for kind in Kind::ALL {
                    let expected: Vec<f32> = range.clone().map(|element| value(segment, kind, element)).collect();
                    assert_eq!(reader.read(segment, kind, range.clone()).unwrap(), expected);
                }
            }
            assert!(reader.read(segment, Kind::Master, 0..info.len + 1).is_err());
        }
        // Other programs read the parts as what they are.
        let bytes = fs::read(saved.folder().join("rank-0.safetensors")).unwrap();
        assert_eq!(safetensors::SafeTensors::deserialize(&bytes).unwrap().len(), 9);
    }

    #[test]
    fn version_1_said_nothing_of_the_device() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path().join("checkpoints"));
        let state = State { device: None, ..saved(&store) };
        assert!(!serde_json::to_string(&state).unwrap().contains("device"));
        store.commit(&state).unwrap();
        let path = store.path(7).join(STATE);
        let now = fs::read_to_string(&path).unwrap();
        fs::write(&path, now.replace("\"version\": 3", "\"version\": 1")).unwrap();
        assert_eq!(Saved::open(&store.path(7)).unwrap().state(), &state);
    }

    #[test]
    fn a_part_that_rank_0_does_not_see_makes_no_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path());
        let state = saved(&store);
        fs::remove_file(store.part(7, 1).0).unwrap();
        let said = store.commit(&state).unwrap_err().to_string();
        assert!(said.contains("rank-1.safetensors") && said.contains("share"), "{said}");
        store.discard(7);
        assert_eq!((store.steps(), store.left_behind().len()), (vec![], 0));
    }

    #[test]
    fn every_element_is_somewhere_once() {
        let segments = layout(&SHAPE).unwrap();
        let piece =
            |segment: &str, start, len, optimizer_steps| Piece { segment: segment.into(), start, len, optimizer_steps };
        let whole = || segments.iter().map(|info| piece(&info.name, 0, info.len, 1)).collect::<Vec<_>>();
        let index_of = |name: &str, pieces: Vec<Piece>| {
            let (sha256, kept) = (String::new(), Vec::new());
            let file = PartFile { name: name.into(), bytes: 0, sha256, rank: None, pieces, kept };
            index(&segments, [(0, &file)].into_iter()).map(drop)
        };
        assert_eq!(index_of("a", whole()), Ok(()));
        for (first, told) in [
            (vec![], "\"embedding\" once"),
            (vec![piece("embedding", 0, 15, 1)], "once"),
            (vec![piece("embedding", 0, 9, 1), piece("embedding", 8, 8, 1)], "once"),
            (vec![piece("embedding", 0, usize::MAX, 1)], "once"),
            (vec![piece("embedding", 1, usize::MAX, 1)], "once"),
            (vec![piece("embedding", 0, 8, 1), piece("embedding", 8, 8, 2)], "different steps"),
            (vec![piece("head", 0, 16, 1)], "no segment \"head\""),
        ] {
            let pieces = first.iter().cloned().chain(whole().into_iter().skip(1)).collect();
            let error = index_of("a", pieces).unwrap_err();
            assert!(error.contains(told), "{first:?}: {error}");
        }
        for name in ["", "..", "/etc/passwd", "../a", "a/b"] {
            assert!(index_of(name, whole()).unwrap_err().contains("not the name of a file"), "{name}");
        }
    }

    #[test]
    fn replicas_are_all_there_and_what_is_kept_is_there_once() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path());
        let state = saved(&store);
        let segments = layout(&SHAPE).unwrap();
        let whole = |segment: &SegmentInfo| Piece {
            segment: segment.name.clone(),
            start: 0,
            len: segment.len,
            optimizer_steps: 6,
        };
        let files = || {
            let pieces: Vec<Piece> = segments.iter().map(whole).collect();
            state.files.iter().map(|file| PartFile { pieces: pieces.clone(), ..file.clone() }).collect::<Vec<_>>()
        };
        let of_ranks = |ranks: [usize; 2]| {
            let own = files().into_iter().zip(ranks).map(|(file, rank)| PartFile { rank: Some(rank), ..file });
            indices(&segments, &State { replicas: true, files: own.collect(), ..state.clone() })
        };
        assert_eq!(of_ranks([1, 0]).unwrap().len(), 2);
        assert!(of_ranks([1, 1]).unwrap_err().starts_with("of rank 0: "));
        let one = State { replicas: true, files: files()[..1].to_vec(), ..state.clone() };
        assert!(indices(&segments, &one).unwrap_err().contains("1 files of 2 ranks"));
        assert!(indices(&segments, &State { files: files(), ..state.clone() }).is_err(), "every element twice");
        let kept_of = |ranks: [Option<usize>; 2], pieces: [(Kept, usize, usize); 2]| {
            let piece = |(what, start, len)| KeptPiece { what, segment: segments[1].name.clone(), start, len };
            let files = state.files.iter().zip(ranks).zip(pieces);
            let files = files.map(|((file, rank), own)| PartFile { rank, kept: vec![piece(own)], ..file.clone() });
            KeptIndex::new(&segments, &State { files: files.collect(), ..state.clone() }).map(drop)
        };
        let kept = |pieces| kept_of([None, None], pieces);
        assert_eq!(kept([(Kept::Factor, 3, 2), (Kept::Factor, 0, 3)]), Ok(()));
        // What compression has left is each rank's own.
        let left = [(Kept::Left, 0, 3), (Kept::Left, 0, 3)];
        assert_eq!(kept_of([Some(1), Some(0)], left), Ok(()));
        assert!(kept_of([Some(0), Some(0)], left).unwrap_err().contains("each left of segment"));
        for ranks in [[Some(0), None], [Some(0), Some(2)]] {
            assert!(kept_of(ranks, left).unwrap_err().contains("does not say to which rank it belongs"));
        }
        let len = segments[1].len;
        for what in [Kept::Anchor, Kept::Velocity, Kept::Arrived] {
            for (start, count) in [(3, len - 4), (4, len - 4), (3, 2)] {
                let error = kept([(what, start, count), (what, 0, 3)]).unwrap_err();
                assert!(error.contains(&format!("each {} of segment", what.name())), "{error}");
            }
            let whole = kept([(what, 3, len - 3), (what, 0, 3)]);
            match what {
                Kept::Anchor => assert!(whole.unwrap_err().contains(&format!("anchors of 1 of {}", segments.len()))),
                _ => assert_eq!(whole, Ok(())),
            }
        }
        for wrong in [[(0, 3), (2, 3)], [(0, 0), (2, 3)], [(len - 1, 2), (0, 1)], [(1, usize::MAX), (0, 1)]] {
            let error = kept(wrong.map(|(start, len)| (Kept::Velocity, start, len))).unwrap_err();
            assert!(error.contains("each velocity of segment"), "{error}");
        }
    }

    #[test]
    fn ranks_that_step_together_go_on_with_one_scaler() {
        let folder = tempfile::tempdir().unwrap();
        let state = saved(&Store::new(folder.path()));
        let of_scale = |scale| ScalerState { scale, ..state.scaler };
        let apart = State { scalers: [8.0, 2.0, 4.0].map(of_scale).into(), ..state.clone() };
        let scales = |state: &State, own| [0, 1, 2, 3].map(|rank| state.scaler_of(rank, own).scale);
        assert_eq!(scales(&apart, true), [8.0, 2.0, 4.0, 8.0]);
        assert_eq!(scales(&apart, false), [2.0; 4]);
        assert_eq!([scales(&state, true), scales(&state, false)], [[state.scaler.scale; 4]; 2]);
    }

    #[test]
    fn only_what_may_change_may_change() {
        let folder = tempfile::tempdir().unwrap();
        let state = saved(&Store::new(folder.path()));
        let now = |seed: u64, strategy: &str| serde_json::json!({"model": SHAPE, "seed": seed, "strategy": strategy});
        assert!(state.contradictions(&now(3, "fsdp"), "ab").is_empty());
        assert_eq!(state.changes(&now(3, "ddp"), 2), [""; 0]);
        assert_eq!(
            state.changes(&now(3, "fsdp"), 4),
            ["there were 2 rank(s) and are 4 now", "--strategy: was \"ddp\" and is \"fsdp\" now"]
        );
        assert_eq!(state.contradictions(&now(4, "ddp"), "ab"), ["--seed: was 3 and is 4 now"]);
        assert_eq!(state.contradictions(&now(3, "ddp"), "cd").len(), 1);
        // A setting that one of both does not know.
        let more = serde_json::json!({"model": SHAPE, "seed": 3, "strategy": "ddp", "dropout": 0.1});
        assert_eq!(state.contradictions(&more, "ab"), ["--dropout: was null and is 0.1 now"]);
    }
}
