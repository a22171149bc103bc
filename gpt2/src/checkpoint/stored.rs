//! Weights on disk, of this program or of Hugging Face's libraries, read a segment at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Checkpoint, CheckpointError, SEVERAL_DOCUMENTS, WeightsHash, config_json, tokenizer_files};
use crate::config::ModelConfig;
use crate::segments::{ModelError, ParamInfo, SegmentInfo, layout};
use crate::tokenizer::Tokenizer;

/// The file of weights in a folder.
pub(super) const WEIGHTS: &str = "model.safetensors";
/// What says which file of a folder has which tensor, where there are several.
const INDEX: &str = "model.safetensors.index.json";
/// What older versions of Hugging Face's libraries wrote.
const PICKLE: &str = "pytorch_model.bin";
/// The name of the head's weights, where they are stored.
const HEAD: &str = "lm_head.weight";
/// The name of the token embedding, which the head shares.
const TOKENS: &str = "wte.weight";
/// Longest header of a file, and longest index, in bytes: as the crate `safetensors` has it.
const LONGEST_HEADER: u64 = 100_000_000;
/// Elements that are read at a time where they have to be converted.
const BLOCK: usize = 1 << 16;

/// A checkpoint on disk: its description, checked, and where its weights lie. No weights are in memory.
///
/// It is one of
/// - a file that [`Checkpoint::save`] wrote, of any version;
/// - a safetensors file that Hugging Face's transformers wrote, beside its `config.json`;
/// - such a model in several files, by their index (`model.safetensors.index.json`);
/// - a folder with one of these.
///
/// Tensors are f32, f16 or bf16, under their names with or without `transformer.` before them. Attention masks among them are passed over.
/// A stored `lm_head.weight` must be equal to `wte.weight`: this program's head has no weights of its own.
#[derive(Debug)]
pub struct StoredWeights {
    path: PathBuf,
    config: ModelConfig,
    tokenizer: Value,
    step: u64,
    several_documents: bool,
    segments: Vec<SegmentInfo>,
    files: Vec<SourceFile>,
    /// Of each segment's tensors, in order.
    places: Vec<Vec<Place>>,
}

/// Weights that a run starts from instead of random ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InitialWeights {
    /// What [`StoredWeights::open`] opens; ranks on different machines may have it under different paths.
    pub path: PathBuf,
    /// [`StoredWeights::hash`] of the weights with the run's block size, equal on all ranks.
    pub hash: String,
}

/// A file in the safetensors format.
#[derive(Debug)]
struct SourceFile {
    path: PathBuf,
    file: File,
    header: Metadata,
    /// Where tensors begin.
    begin: u64,
}

/// Where a tensor lies.
#[derive(Clone, Copy, Debug)]
struct Place {
    file: usize,
    offset: u64,
    float: Float,
}

/// A type of weights on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Float {
    F32,
    F16,
    Bf16,
}

/// What a path stands for.
enum Location {
    File(PathBuf),
    Index(PathBuf),
}

impl StoredWeights {
    /// Opens the checkpoint at `path`, a file or a folder, and checks that it holds every tensor of its config in the right shape.
    ///
    /// # Errors
    /// [`CheckpointError::Io`]; [`CheckpointError::Format`] for a truncated or other file; [`CheckpointError::Foreign`] if description or
    /// tensors are not those of a GPT-2; [`CheckpointError::Unsupported`] for a variant that this program's model does not compute.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        match Location::of(path)? {
            Location::File(file) => {
                let source = SourceFile::open(&file)?;
                let folder = folder_of(&file);
                if let Some(metadata) = source.own_metadata() {
                    let described = Described::by_metadata(&file, metadata)?;
                    return Self::new(&file, described, vec![source], None);
                }
                let described = Described::by_folder(&file, &folder)?;
                Self::new(&file, described, vec![source], None)
            }
            Location::Index(index) => {
                let folder = folder_of(&index);
                let described = Described::by_folder(&index, &folder)?;
                let (files, map) = read_index(&index, &folder)?;
                Self::new(&index, described, files, Some(map))
            }
        }
    }

    /// The file of weights, or the index of several.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Steps trained so far; 0 of a model that this program did not train.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Whether it was trained on several documents: see [`Checkpoint::several_documents`].
    pub fn several_documents(&self) -> bool {
        self.several_documents
    }

    /// The model's tokenizer; `None` where nothing says which it is.
    ///
    /// # Errors
    /// [`CheckpointError::Foreign`] for a description that is none of a tokenizer of this program.
    pub fn tokenizer(&self) -> Result<Option<Tokenizer>, CheckpointError> {
        if self.tokenizer.is_null() {
            return Ok(None);
        }
        let tokenizer = serde_json::from_value(self.tokenizer.clone());
        tokenizer.map(Some).map_err(|error| foreign(&self.path, format!("its tokenizer: {error}")))
    }

    /// The same model for sequences of `block_size` tokens, of whose positions the first are kept.
    ///
    /// # Errors
    /// [`CheckpointError::TooFewPositions`], [`CheckpointError::Model`] for none.
    pub fn with_block_size(mut self, block_size: usize) -> Result<Self, CheckpointError> {
        let has = self.config.block_size;
        if block_size > has {
            return Err(CheckpointError::TooFewPositions { path: self.path, has, wanted: block_size });
        }
        self.config.block_size = block_size;
        self.segments = layout(&self.config)?;
        Ok(self)
    }

    /// One segment's weights (see [`layout`]), in f32.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] if the file cannot be read, [`CheckpointError::Model`] if there is no such segment.
    pub fn segment(&self, segment: usize) -> Result<Vec<f32>, CheckpointError> {
        let (Some(info), Some(places)) = (self.segments.get(segment), self.places.get(segment)) else {
            return Err(ModelError::NoSuchSegment { segment, segments: self.segments.len() }.into());
        };
        let mut flat = vec![0.0; info.len];
        for (param, place) in info.params.iter().zip(places) {
            if let Some(values) = flat.get_mut(param.offset..param.offset + param.len) {
                self.read(*place, 0, values)?;
            }
        }
        Ok(flat)
    }

    /// The hash of all weights in f32: that of [`weights_hash`](super::weights_hash) of the model with these weights.
    ///
    /// # Errors
    /// Those of [`segment`](Self::segment).
    pub fn hash(&self) -> Result<String, CheckpointError> {
        let mut hash = WeightsHash::default();
        for segment in 0..self.segments.len() {
            hash.add(&self.segment(segment)?);
        }
        Ok(hash.finish())
    }

    /// All of it in memory.
    ///
    /// # Errors
    /// Those of [`segment`](Self::segment).
    pub fn load(&self) -> Result<Checkpoint, CheckpointError> {
        Ok(Checkpoint {
            config: self.config.clone(),
            tokenizer: self.tokenizer.clone(),
            step: self.step,
            several_documents: self.several_documents,
            weights: (0..self.segments.len()).map(|segment| self.segment(segment)).collect::<Result<_, _>>()?,
        })
    }

    /// `map` says which of `files` has which tensor; without it the first has all.
    fn new(
        path: &Path,
        described: Described,
        files: Vec<SourceFile>,
        map: Option<BTreeMap<String, usize>>,
    ) -> Result<Self, CheckpointError> {
        let Described { config, tokenizer, step, several_documents } = described;
        // The config is bounded by validation, the weights by the files' own lengths.
        let segments = layout(&config).map_err(|error| foreign(path, format!("its config: {error}")))?;
        let mut tensors = tensors(path, &files, map)?;
        let head = tensors.remove(HEAD);
        let place_of = |param: &ParamInfo, tensors: &mut BTreeMap<String, (usize, TensorInfo)>| {
            let found = tensors.remove(&param.path);
            let (file, info) = found.ok_or_else(|| foreign(path, format!("it has no tensor {:?}", param.path)))?;
            place(path, &files, &param.path, &param.shape, file, &info)
        };
        let places = segments
            .iter()
            .map(|segment| segment.params.iter().map(|param| place_of(param, &mut tensors)).collect())
            .collect::<Result<Vec<Vec<Place>>, CheckpointError>>()?;
        if let Some(name) = tensors.keys().next() {
            let others = match tensors.len() - 1 {
                0 => String::new(),
                others => format!(" and {others} more"),
            };
            let detail = format!("it holds tensors that a GPT-2 of its config does not have: {name:?}{others}");
            return Err(foreign(path, detail));
        }
        let head = match head {
            Some((file, info)) => {
                let shape = [config.vocab_size, config.n_embd];
                Some(place(path, &files, HEAD, &shape, file, &info)?)
            }
            None => None,
        };
        let stored = Self { path: path.into(), config, tokenizer, step, several_documents, segments, files, places };
        if let Some(head) = head {
            stored.check_head(head)?;
        }
        Ok(stored)
    }

    /// Refuses a head with weights of its own.
    fn check_head(&self, head: Place) -> Result<(), CheckpointError> {
        let Some(tokens) = self.places.first().and_then(|places| places.first()) else { return Ok(()) };
        let len = self.config.vocab_size * self.config.n_embd;
        let (mut ours, mut theirs) = (vec![0.0; BLOCK.min(len)], vec![0.0; BLOCK.min(len)]);
        for start in (0..len).step_by(BLOCK) {
            let count = BLOCK.min(len - start);
            self.read(*tokens, start, &mut ours[..count])?;
            self.read(head, start, &mut theirs[..count])?;
            if ours[..count].iter().zip(&theirs[..count]).any(|(a, b)| a.to_bits() != b.to_bits()) {
                let detail = format!(
                    "its {HEAD:?} differs from its {TOKENS:?}: the weights of its head and its embedding are not tied"
                );
                return Err(CheckpointError::Unsupported { path: self.path.clone(), detail });
            }
        }
        Ok(())
    }

    /// The tensor at `place` from element `start` on, over `values`.
    fn read(&self, place: Place, start: usize, values: &mut [f32]) -> Result<(), CheckpointError> {
        let Some(source) = self.files.get(place.file) else {
            return Err(foreign(&self.path, "one of its files is missing".into()));
        };
        let offset = place.offset + (start * place.float.size()) as u64;
        let read = match place.float {
            Float::F32 => {
                let read = source.file.read_exact_at(bytemuck::cast_slice_mut(values), offset);
                if cfg!(target_endian = "big") {
                    values.iter_mut().for_each(|value| *value = f32::from_bits(value.to_bits().swap_bytes()));
                }
                read
            }
            Float::F16 => read_halves(&source.file, offset, values, |bytes| f16::from_le_bytes(bytes).to_f32()),
            Float::Bf16 => read_halves(&source.file, offset, values, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        };
        read.map_err(|error| super::io(&source.path, "cannot read it", error))
    }
}

impl Location {
    fn of(path: &Path) -> Result<Self, CheckpointError> {
        let metadata = fs::metadata(path).map_err(|error| super::io(path, "cannot read it", error))?;
        if !metadata.is_dir() {
            let is_index = path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(".index.json"));
            return Ok(if is_index { Location::Index(path.into()) } else { Location::File(path.into()) });
        }
        let [weights, index] = [WEIGHTS, INDEX].map(|name| path.join(name));
        if weights.exists() {
            return Ok(Location::File(weights));
        }
        if index.exists() {
            return Ok(Location::Index(index));
        }
        let pickle = if path.join(PICKLE).exists() {
            format!(
                "; its {PICKLE} is not opened, because a pickle can run code: let transformers save the model as safetensors"
            )
        } else {
            String::new()
        };
        Err(foreign(path, format!("the folder holds neither {WEIGHTS} nor {INDEX}{pickle}")))
    }
}

impl SourceFile {
    /// Opens a file and reads its header.
    fn open(path: &Path) -> Result<Self, CheckpointError> {
        let cannot_read = |error| super::io(path, "cannot read it", error);
        let format = |detail: String| CheckpointError::Format { path: path.into(), detail };
        // Opening a pipe would wait for a writer.
        if !fs::metadata(path).map_err(cannot_read)?.is_file() {
            return Err(format("it is not a regular file".into()));
        }
        let file = File::open(path).map_err(cannot_read)?;
        let length = file.metadata().map_err(cannot_read)?.len();
        let mut first = [0; 8];
        if length < 8 {
            return Err(format(format!("it has {length} bytes")));
        }
        file.read_exact_at(&mut first, 0).map_err(cannot_read)?;
        let header_length = u64::from_le_bytes(first);
        if header_length > LONGEST_HEADER.min(length - 8) {
            return Err(format(format!("its header would be {header_length} bytes long, in a file of {length}")));
        }
        let mut header = vec![0; header_length as usize];
        file.read_exact_at(&mut header, 8).map_err(cannot_read)?;
        let header: Metadata =
            serde_json::from_slice(&header).map_err(|error| format(format!("its header: {error}")))?;
        let begin = 8 + header_length;
        let expected = begin.saturating_add(header.data_len() as u64);
        if expected != length {
            return Err(format(format!("its header describes {expected} bytes, and it has {length}")));
        }
        Ok(SourceFile { path: path.into(), file, header, begin })
    }

    /// The metadata of a file of this program.
    fn own_metadata(&self) -> Option<&std::collections::HashMap<String, String>> {
        self.header.metadata().as_ref().filter(|metadata| metadata.contains_key("config"))
    }
}

/// What is known of a model beside its weights.
struct Described {
    config: ModelConfig,
    tokenizer: Value,
    step: u64,
    several_documents: bool,
}

impl Described {
    /// As this program writes it into a file of weights.
    fn by_metadata(path: &Path, metadata: &std::collections::HashMap<String, String>) -> Result<Self, CheckpointError> {
        let field =
            |name: &str| metadata.get(name).ok_or_else(|| foreign(path, format!("its metadata has no {name:?}")));
        let bad = |name: &str, error: &dyn std::fmt::Display| {
            foreign(path, format!("its metadata's {name:?} is unreadable: {error}"))
        };
        let several_documents = metadata.get(SEVERAL_DOCUMENTS).map_or(Ok(false), |value| value.parse());
        Ok(Described {
            config: serde_json::from_str(field("config")?).map_err(|error| bad("config", &error))?,
            tokenizer: serde_json::from_str(field("tokenizer")?).map_err(|error| bad("tokenizer", &error))?,
            step: field("step")?.parse().map_err(|error| bad("step", &error))?,
            several_documents: several_documents.map_err(|error| bad(SEVERAL_DOCUMENTS, &error))?,
        })
    }

    /// As Hugging Face's libraries write it beside the weights.
    fn by_folder(weights: &Path, folder: &Path) -> Result<Self, CheckpointError> {
        let path = folder.join(config_json::NAME);
        if !path.exists() {
            let detail = format!(
                "it was not saved by this program, and there is no {} beside it, which would have the model's shape",
                config_json::NAME
            );
            return Err(foreign(weights, detail));
        }
        let config = config_json::read(&path)?;
        let tokenizer = tokenizer_files::identify(folder, config.vocab_size)?;
        let tokenizer = tokenizer.map(serde_json::to_value).transpose();
        let tokenizer = tokenizer.map_err(|error| foreign(folder, format!("its tokenizer: {error}")))?;
        // GPT-2's own were, and nothing is known of others.
        let several_documents = tokenizer.as_ref().is_some_and(|tokenizer| tokenizer["kind"] == "gpt2");
        Ok(Described { config, tokenizer: tokenizer.unwrap_or(Value::Null), step: 0, several_documents })
    }
}

impl Float {
    fn of(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F32 => Some(Float::F32),
            Dtype::F16 => Some(Float::F16),
            Dtype::BF16 => Some(Float::Bf16),
            _ => None,
        }
    }

    /// Bytes of an element.
    fn size(self) -> usize {
        match self {
            Float::F32 => 4,
            Float::F16 | Float::Bf16 => 2,
        }
    }
}

/// The files of an index, and which of them has which tensor.
fn read_index(index: &Path, folder: &Path) -> Result<(Vec<SourceFile>, BTreeMap<String, usize>), CheckpointError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let text = read_short(index)?;
    let Index { weight_map } = serde_json::from_slice(&text)
        .map_err(|error| foreign(index, format!("it is not an index of tensors: {error}")))?;
    let names: BTreeSet<&String> = weight_map.values().collect();
    let mut files = Vec::with_capacity(names.len());
    for name in &names {
        if Path::new(name).file_name() != Some(name.as_ref()) {
            return Err(foreign(index, format!("it names {name:?}, which is not a file in its folder")));
        }
        files.push(SourceFile::open(&folder.join(name))?);
    }
    let order: BTreeMap<&String, usize> = names.iter().enumerate().map(|(file, name)| (*name, file)).collect();
    let map = weight_map.iter().filter_map(|(tensor, name)| Some((tensor.clone(), *order.get(name)?))).collect();
    Ok((files, map))
}

/// The tensors of a model by their names without prefix, with the file that has each; masks are left out.
fn tensors(
    path: &Path,
    files: &[SourceFile],
    map: Option<BTreeMap<String, usize>>,
) -> Result<BTreeMap<String, (usize, TensorInfo)>, CheckpointError> {
    let map = map.unwrap_or_else(|| {
        let names = files.iter().flat_map(|file| file.header.tensors().into_keys());
        names.map(|name| (name, 0)).collect()
    });
    let mut tensors = BTreeMap::new();
    for (stored, file) in map {
        let name = stored.strip_prefix("transformer.").unwrap_or(&stored).to_owned();
        if is_mask(&name) {
            continue;
        }
        let Some(info) = files.get(file).and_then(|file| file.header.info(&stored)) else {
            let in_file = files.get(file).map(|file| file.path.display().to_string()).unwrap_or_default();
            return Err(foreign(path, format!("it says that {stored:?} is in {in_file}, which does not have it")));
        };
        if tensors.insert(name.clone(), (file, info.clone())).is_some() {
            return Err(foreign(
                path,
                format!("it holds the tensor {name:?} twice, with and without \"transformer.\""),
            ));
        }
    }
    Ok(tensors)
}

/// Whether a tensor is an attention mask, which older versions of Hugging Face's libraries stored.
fn is_mask(name: &str) -> bool {
    let parts: Vec<&str> = name.split('.').collect();
    matches!(parts[..], ["h", layer, "attn", "bias" | "masked_bias"] if layer.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Where a tensor of this name and shape lies, whose header is `info`.
fn place(
    path: &Path,
    files: &[SourceFile],
    name: &str,
    shape: &[usize],
    file: usize,
    info: &TensorInfo,
) -> Result<Place, CheckpointError> {
    let (Some(float), true) = (Float::of(info.dtype), info.shape == shape) else {
        return Err(foreign(
            path,
            format!(
                "its tensor {name:?} is {:?} {:?}, and its config asks for {shape:?} in F32, F16 or BF16",
                info.dtype, info.shape
            ),
        ));
    };
    let begin = files.get(file).map_or(0, |source| source.begin);
    Ok(Place { file, offset: begin + info.data_offsets.0 as u64, float })
}

fn read_halves(file: &File, offset: u64, values: &mut [f32], convert: impl Fn([u8; 2]) -> f32) -> io::Result<()> {
    let mut bytes = vec![0; 2 * BLOCK.min(values.len())];
    for (block, values) in values.chunks_mut(BLOCK).enumerate() {
        let bytes = &mut bytes[..2 * values.len()];
        file.read_exact_at(bytes, offset + (2 * BLOCK * block) as u64)?;
        for (value, pair) in values.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *value = convert(*pair);
        }
    }
    Ok(())
}

/// The bytes of a file that is short.
pub(super) fn read_short(path: &Path) -> Result<Vec<u8>, CheckpointError> {
    let cannot_read = |error| super::io(path, "cannot read it", error);
    let metadata = fs::metadata(path).map_err(cannot_read)?;
    if !metadata.is_file() || metadata.len() > LONGEST_HEADER {
        let detail = format!("it is not a regular file of at most {LONGEST_HEADER} bytes");
        return Err(CheckpointError::Format { path: path.into(), detail });
    }
    fs::read(path).map_err(cannot_read)
}

fn folder_of(file: &Path) -> PathBuf {
    file.parent().map(Path::to_path_buf).unwrap_or_default()
}

fn foreign(path: &Path, detail: String) -> CheckpointError {
    CheckpointError::Foreign { path: path.into(), detail }
}
