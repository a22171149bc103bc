//! Checkpoints: one file in the safetensors format with Hugging Face's tensor names, so that other tools read the weights. The config, the
//! tokenizer's description and the step lie in the file's metadata. Beside it lie the files by which Hugging Face's libraries open its folder
//! ([`companions()`]). What is opened may also be Hugging Face's own: see [`StoredWeights`]. The whole state of a run, from which it goes on,
//! is a folder: [`sharded`].

mod companions;
mod config_json;
pub mod sharded;
mod stored;
mod tokenizer_files;

use std::borrow::Cow;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use burn::tensor::Device;
use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::config::ModelConfig;
use crate::segments::{ModelError, SegmentedModel, layout};

pub use companions::{COMPANIONS, companions, save_companions};
pub use stored::{InitialWeights, StoredWeights};

/// The value of the metadata's `format` that Hugging Face's loaders ask for.
const FORMAT: &str = "pt";

/// The name of the entry of the metadata that need not be there.
const SEVERAL_DOCUMENTS: &str = "several_documents";

/// What a checkpoint holds, checked and in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    /// The model's shape.
    pub config: ModelConfig,
    /// Whatever the tokenizer needs to be made again; null where nothing is known of it.
    pub tokenizer: Value,
    /// Steps trained so far.
    pub step: u64,
    /// Whether it was trained on several documents, each begun after the mark that ends one
    /// ([`Corpus::has_several_documents`](crate::corpus::Corpus::has_several_documents)). Files of earlier versions do not say, which counts as
    /// no.
    pub several_documents: bool,
    /// Each segment's flat weights, in forward order (see [`layout`]).
    pub weights: Vec<Vec<f32>>,
}

/// What went wrong with a checkpoint, and where.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file system refused.
    #[error("checkpoint {}: {what}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// The bytes are no complete safetensors file.
    #[error(
        "checkpoint {}: not a complete safetensors file (cut off, or a file of another kind?): {detail}",
        path.display()
    )]
    Format {
        /// The file.
        path: PathBuf,
        /// The parser's message.
        detail: String,
    },
    /// A valid file without what a GPT-2 of this program or of Hugging Face's libraries has.
    #[error("checkpoint {}: {detail}; is it a GPT-2 that this program or Hugging Face's transformers saved?", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What is missing or unexpected.
        detail: String,
    },
    /// A GPT-2 with something that this program's does not have.
    #[error("checkpoint {}: {detail}, which this program does not support", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The setting.
        detail: String,
    },
    /// A run of longer sequences than the model has positions.
    #[error("checkpoint {}: it has {has} positions, fewer than --block-size {wanted}; give at most {has}", path.display())]
    TooFewPositions {
        /// The file.
        path: PathBuf,
        /// Its positions.
        has: usize,
        /// Those that were asked for.
        wanted: usize,
    },
    /// The model failed.
    #[error(transparent)]
    Model(#[from] ModelError),
}

impl Checkpoint {
    /// The weights, config and so on of `model` at `step`, as of one that was not trained on several documents.
    ///
    /// # Errors
    /// [`CheckpointError::Model`] if the device fails.
    pub fn of(model: &SegmentedModel, tokenizer: Value, step: u64) -> Result<Self, CheckpointError> {
        let weights =
            (0..model.segments().len()).map(|segment| model.read_params(segment)).collect::<Result<_, _>>()?;
        Ok(Self { config: model.config().clone(), tokenizer, step, several_documents: false, weights })
    }

    /// The model on `device`.
    ///
    /// # Errors
    /// [`CheckpointError::Model`] if config and weights disagree (never so for a loaded checkpoint).
    pub fn model(&self, device: &Device) -> Result<SegmentedModel, CheckpointError> {
        let mut model = SegmentedModel::zeros(self.config.clone(), device)?;
        for (segment, flat) in self.weights.iter().enumerate() {
            model.write_params(segment, flat)?;
        }
        Ok(model)
    }

    /// The hash of its weights: that of [`weights_hash`] of its model.
    pub fn weights_hash(&self) -> String {
        let mut hash = WeightsHash::default();
        self.weights.iter().for_each(|segment| hash.add(segment));
        hash.finish()
    }

    /// Writes the checkpoint to `path`. The file appears under its name only when it is whole and on disk: a crash leaves the old file, or
    /// none. Equal checkpoints make equal files.
    ///
    /// # Errors
    /// [`CheckpointError::Io`], [`CheckpointError::Model`] if config and weights disagree.
    pub fn save(&self, path: &Path) -> Result<(), CheckpointError> {
        let segments = layout(&self.config)?;
        let mut tensors = Vec::new();
        for (info, flat) in segments.iter().zip(&self.weights) {
            for param in &info.params {
                let piece =
                    flat.get(param.offset..param.offset + param.len).filter(|_| flat.len() == info.len).ok_or_else(
                        || ModelError::SegmentLength { name: info.name.clone(), expected: info.len, len: flat.len() },
                    )?;
                tensors.push((param.path.as_str(), param.shape.as_slice(), piece));
            }
        }
        // In the order in which the crate `safetensors` writes them.
        tensors.sort_unstable_by_key(|(name, ..)| *name);
        let metadata = [
            ("format", FORMAT.to_owned()),
            ("config", json(path, &self.config)?),
            ("tokenizer", json(path, &self.tokenizer)?),
            ("step", self.step.to_string()),
            (SEVERAL_DOCUMENTS, self.several_documents.to_string()),
        ];
        let header = header(path, &metadata, &tensors)?;
        write_atomically(path, |file| {
            file.write_all(&(header.len() as u64).to_le_bytes())?;
            file.write_all(&header)?;
            tensors.iter().try_for_each(|(.., piece)| file.write_all(&little_endian_bytes(piece)))
        })
    }

    /// Reads and checks the checkpoint at `path`: any that [`StoredWeights`] opens.
    ///
    /// # Errors
    /// Those of [`StoredWeights::open`] and [`StoredWeights::segment`].
    pub fn load(path: &Path) -> Result<Self, CheckpointError> {
        StoredWeights::open(path)?.load()
    }
}

/// SHA-256, in hexadecimal, over the little-endian f32 bytes of all segments in forward order: equal exactly if the weights are equal to
/// the bit.
///
/// # Errors
/// [`ModelError::Device`] if the device fails.
pub fn weights_hash(model: &SegmentedModel) -> Result<String, ModelError> {
    let mut hash = WeightsHash::default();
    for segment in 0..model.segments().len() {
        hash.add(&model.read_params(segment)?);
    }
    Ok(hash.finish())
}

/// The hash of [`weights_hash`] from segments that come one after another.
#[derive(Clone, Debug, Default)]
pub struct WeightsHash(Sha256);

impl WeightsHash {
    /// The next segment's weights.
    pub fn add(&mut self, weights: &[f32]) {
        self.0.update(little_endian_bytes(weights));
    }

    /// The hash, in hexadecimal.
    pub fn finish(self) -> String {
        comm_core::hex(&self.0.finalize())
    }
}

/// A tensor's entry in the header.
#[derive(Serialize)]
struct Entry<'a> {
    dtype: &'static str,
    shape: &'a [usize],
    data_offsets: [usize; 2],
}

/// The header of a safetensors file of f32 tensors that follow one another: JSON, filled up with spaces to whole words of 8 bytes, so that
/// the tensors after it are aligned. The crate's own writer would order the metadata differently each time.
fn header(
    path: &Path,
    metadata: &[(&str, String)],
    tensors: &[(&str, &[usize], &[f32])],
) -> Result<Vec<u8>, CheckpointError> {
    let entry = |name: &str, value: String| Ok(format!("{}:{value}", json(path, &name)?));
    let object = |entries: Vec<Result<String, CheckpointError>>| {
        let entries = entries.into_iter().collect::<Result<Vec<String>, _>>()?;
        Ok::<String, CheckpointError>(format!("{{{}}}", entries.join(",")))
    };
    let metadata = metadata.iter().map(|(name, value)| entry(name, json(path, value)?)).collect();
    let mut entries = vec![entry("__metadata__", object(metadata)?)];
    let mut end = 0;
    for (name, shape, piece) in tensors {
        let start = end;
        end += size_of_val(*piece);
        entries.push(entry(name, json(path, &Entry { dtype: "F32", shape, data_offsets: [start, end] })?));
    }
    let mut header = object(entries)?.into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok(header)
}

fn little_endian_bytes(values: &[f32]) -> Cow<'_, [u8]> {
    if cfg!(target_endian = "little") {
        return Cow::Borrowed(bytemuck::cast_slice(values));
    }
    Cow::Owned(values.iter().flat_map(|value| value.to_le_bytes()).collect())
}

fn json(path: &Path, value: &impl Serialize) -> Result<String, CheckpointError> {
    serde_json::to_string(value)
        .map_err(|error| CheckpointError::Format { path: path.into(), detail: error.to_string() })
}

/// Where a checkpoint lies until it is whole. In the same folder, so that the rename stays within one file system; always the same name, so
/// that a run that was killed while it wrote leaves one such file at most, for the next to replace.
pub(crate) fn temporary(path: &Path) -> PathBuf {
    let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    path.with_file_name(format!(".{name}.tmp"))
}

/// Gives the file `saved` the name `other` as well, in the place of what had it. Where the file system has no second names, it is copied.
pub(crate) fn keep_as(saved: &Path, other: &Path) -> Result<(), CheckpointError> {
    let temporary = temporary(other);
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(io(other, "cannot remove a file that an earlier save left beside it", error));
        }
        _ => {}
    }
    if fs::hard_link(saved, &temporary).is_err() {
        let copied = fs::copy(saved, &temporary).and_then(|_| File::open(&temporary)?.sync_all());
        copied.map_err(|e| io(other, "cannot copy the weights to it (disk full?)", e))?;
    }
    fs::rename(&temporary, other).map_err(|e| io(other, "cannot rename the finished file to it", e))
}

fn write_atomically(path: &Path, write: impl FnOnce(&mut File) -> std::io::Result<()>) -> Result<(), CheckpointError> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let temporary = temporary(path);
    let written = File::create(&temporary)
        .map_err(|e| io(path, "cannot create a file beside it", e))
        .and_then(|mut file| {
            write(&mut file).and_then(|()| file.sync_all()).map_err(|e| io(path, "cannot write it (disk full?)", e))
        })
        .and_then(|()| fs::rename(&temporary, path).map_err(|e| io(path, "cannot rename the finished file to it", e)));
    if written.is_err() {
        // The error of the write says more than one of this would.
        let _ = fs::remove_file(&temporary);
    }
    written?;
    // The rename itself is on disk only once the folder is.
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(|e| io(path, "cannot sync its folder", e))
}

fn io(path: &Path, what: &'static str, source: std::io::Error) -> CheckpointError {
    CheckpointError::Io { path: path.into(), what, source }
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::*;
    use crate::config::Preset;

    fn saved(folder: &Path) -> (PathBuf, Checkpoint) {
        let model = SegmentedModel::new(Preset::Micro.config(61), 11, &Device::flex()).unwrap();
        let tokenizer = serde_json::json!({"kind": "byte"});
        let checkpoint = Checkpoint::of(&model, tokenizer, 42).unwrap();
        let path = folder.join("model.safetensors");
        checkpoint.save(&path).unwrap();
        (path, checkpoint)
    }

    #[test]
    fn what_is_saved_is_loaded_and_the_hash_is_that_of_the_bits() {
        let folder = tempfile::tempdir().unwrap();
        let (path, checkpoint) = saved(folder.path());
        // Over the old file, too.
        checkpoint.save(&path).unwrap();
        let loaded = Checkpoint::load(&path).unwrap();
        assert_eq!(loaded, checkpoint);
        let hash = |c: &Checkpoint| weights_hash(&c.model(&Device::flex()).unwrap()).unwrap();
        assert_eq!(hash(&loaded), hash(&checkpoint));
        assert_eq!(hash(&loaded).len(), 64);
        let mut other = loaded.clone();
        other.weights[1][0] = f32::from_bits(other.weights[1][0].to_bits() ^ 1);
        assert_ne!(hash(&other), hash(&loaded));
        let files = fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(files, 1, "temporary files must not stay");
    }

    #[test]
    fn what_is_known_of_documents_may_be_missing_but_not_wrong() {
        let folder = tempfile::tempdir().unwrap();
        let (path, mut checkpoint) = saved(folder.path());
        checkpoint.several_documents = true;
        checkpoint.save(&path).unwrap();
        assert_eq!(Checkpoint::load(&path).unwrap(), checkpoint);
        let whole = fs::read(&path).unwrap();
        let entry = br#","several_documents":"true""#;
        let at = whole.windows(entry.len()).position(|part| part == entry).unwrap();
        // As files of earlier versions are: no such entry.
        let mut older = whole.clone();
        older[at..at + entry.len()].fill(b' ');
        fs::write(&path, older).unwrap();
        assert_eq!(Checkpoint::load(&path).unwrap(), Checkpoint { several_documents: false, ..checkpoint });
        let mut wrong = whole;
        wrong[at + entry.len() - 2] = b'x';
        fs::write(&path, wrong).unwrap();
        let error = Checkpoint::load(&path).unwrap_err().to_string();
        assert!(error.contains("several_documents"), "{error}");
    }

    #[test]
    fn what_is_kept_under_another_name_stays_when_the_next_is_saved() {
        let folder = tempfile::tempdir().unwrap();
        let (path, checkpoint) = saved(folder.path());
        let best = folder.path().join("best.safetensors");
        fs::write(temporary(&best), "of a run that was killed").unwrap();
        for step in [42, 43] {
            keep_as(&path, &best).unwrap();
            assert_eq!(Checkpoint::load(&best).unwrap().step, step);
            Checkpoint { step: step + 1, ..checkpoint.clone() }.save(&path).unwrap();
            assert_eq!(Checkpoint::load(&best).unwrap().step, step);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        assert!(keep_as(&folder.path().join("none"), &best).is_err());
    }

    #[test]
    fn equal_checkpoints_are_equal_files_with_aligned_tensors() {
        let folder = tempfile::tempdir().unwrap();
        let (path, checkpoint) = saved(folder.path());
        let first = fs::read(&path).unwrap();
        for _ in 0..10 {
            checkpoint.save(&path).unwrap();
            assert!(fs::read(&path).unwrap() == first, "another file of the same checkpoint");
        }
        let length = u64::from_le_bytes(first[..8].try_into().unwrap());
        assert_eq!(length % 8, 0, "the first tensor is not aligned");
        assert!(first[8..].starts_with(br#"{"__metadata__":{"format":"pt","#));
    }

    #[test]
    fn files_of_the_safetensors_crate_hold_the_same_and_are_read_alike() {
        let folder = tempfile::tempdir().unwrap();
        let (path, checkpoint) = saved(folder.path());
        let ours = fs::read(&path).unwrap();
        let tensors = SafeTensors::deserialize(&ours).unwrap();
        let (_, header) = SafeTensors::read_metadata(&ours).unwrap();
        let theirs = safetensors::serialize(tensors.iter(), header.metadata().clone()).unwrap();
        let data = |bytes: &[u8]| {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            bytes[8 + length..].to_vec()
        };
        assert_eq!(ours.len(), theirs.len());
        assert!(data(&ours) == data(&theirs));
        fs::write(&path, theirs).unwrap();
        assert_eq!(Checkpoint::load(&path).unwrap(), checkpoint);
    }

    #[test]
    fn truncated_and_foreign_files_are_explained() {
        let folder = tempfile::tempdir().unwrap();
        let (path, _) = saved(folder.path());
        let whole = fs::read(&path).unwrap();
        let load = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            Checkpoint::load(&path).unwrap_err()
        };
        for cut in [0, 3, 8, 100, whole.len() / 2, whole.len() - 1] {
            let error = load(&whole[..cut]);
            assert!(matches!(error, CheckpointError::Format { .. }), "{error}");
        }
        let mut huge_header = whole.clone();
        huge_header[..8].fill(0xff);
        assert!(matches!(load(&huge_header), CheckpointError::Format { .. }));

        let swap = |from: &str, to: &str| {
            assert_eq!(from.len(), to.len());
            let at = whole.windows(from.len()).position(|w| w == from.as_bytes());
            let mut bytes = whole.clone();
            let at = at.expect("the header holds it");
            bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
            bytes
        };
        for (from, to, told) in [
            ("\"step\"", "\"stop\"", "step"),
            ("ln_f.weight", "ln_f.wEight", "ln_f.weight"),
            (r#"\"n_embd\":32"#, r#"\"n_embd\":34"#, "wte.weight"),
            (r#"\"n_layer\":2"#, r#"\"n_layer\":0"#, "n_layer"),
            (r#"\"n_layer\":2"#, r#"\"n_layer\":1"#, "tensors"),
        ] {
            let error = load(&swap(from, to));
            assert!(matches!(error, CheckpointError::Foreign { .. }), "{error}");
            let message = error.to_string();
            assert!(message.contains(told), "{message}");
        }
        let missing = Checkpoint::load(&folder.path().join("none")).unwrap_err();
        assert!(missing.to_string().contains("none"), "{missing}");
    }
}
