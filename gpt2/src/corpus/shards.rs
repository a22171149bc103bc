//! Token shards: llm.c's layout (a header of 256 32-bit integers, then 16-bit ids) and nanoGPT's (16-bit ids alone),
//! both little-endian.

use std::path::{Path, PathBuf};

use super::{CorpusError, formats, text, tokens::TokenStream};
use crate::{sys::MappedFile, tokenizer::GPT2_VOCABULARY};

/// First integer of an llm.c shard of GPT-2 ids.
const MAGIC: u32 = 20_240_520;
/// Second integer: 16-bit GPT-2 ids.
const VERSION: u32 = 1;
/// Bytes of the header.
const HEADER: usize = 256 * 4;

/// The shards of a folder, told apart by name where both parts are there.
pub(super) enum ShardSet {
    /// One stream, to be split.
    Whole(Vec<PathBuf>),
    /// Training and validation shards.
    Parts { train: Vec<PathBuf>, validation: Vec<PathBuf> },
}

impl ShardSet {
    /// Sorts `shards` (in order of path) into parts by their names: `train*.bin` and `val*.bin`, or llm.c's
    /// `*_train_*.bin` and `*_val_*.bin`. Shards with other names are left out where both parts are there.
    pub(super) fn of(shards: Vec<PathBuf>) -> Self {
        let named =
            |part: &str| -> Vec<PathBuf> { shards.iter().filter(|path| names_part(path, part)).cloned().collect() };
        let (train, validation) = (named("train"), named("val"));
        if train.is_empty() || validation.is_empty() { Self::Whole(shards) } else { Self::Parts { train, validation } }
    }
}

/// Maps `paths` and joins them in the order given.
///
/// # Errors
/// A shard that cannot be read, is empty, is no shard of GPT-2 ids, or whose length contradicts its header. Ids are
/// checked when the stream is first read through.
pub(super) fn open(paths: Vec<PathBuf>) -> Result<TokenStream, CorpusError> {
    let shards = paths
        .into_iter()
        .map(|path| {
            text::require_file(&path)?;
            let file = MappedFile::open(&path).map_err(|source| CorpusError::Read { path: path.clone(), source })?;
            let header = check_layout(&path, file.bytes())?;
            Ok((path, file, header))
        })
        .collect::<Result<Vec<_>, CorpusError>>()?;
    Ok(TokenStream::mapped(shards, GPT2_VOCABULARY))
}

/// The header of a shard of llm.c with so many GPT-2 ids.
pub(super) fn header(tokens: u32) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    for (place, integer) in header.chunks_exact_mut(4).zip([MAGIC, VERSION, tokens]) {
        place.copy_from_slice(&integer.to_le_bytes());
    }
    header
}

/// The number of header bytes of a shard: 0 for nanoGPT's layout.
fn check_layout(path: &Path, bytes: &[u8]) -> Result<usize, CorpusError> {
    let path = || path.to_owned();
    let length = |expected: u64| CorpusError::ShardLength { path: path(), expected, found: bytes.len() as u64 };
    let Some(first_id) = bytes.first_chunk().map(|&pair| u16::from_le_bytes(pair)) else {
        return Err(if bytes.is_empty() { CorpusError::Empty { path: path() } } else { length(2) });
    };
    if integer(bytes, 0) != Some(MAGIC) {
        if let Some(format) = formats::not_ids(bytes) {
            return Err(CorpusError::other_format(path(), format, "a shard of 16-bit GPT-2 ids"));
        }
        // The low half of every magic number of llm.c is above GPT-2's last id, so no file of bare ids starts with one.
        if usize::from(first_id) >= GPT2_VOCABULARY {
            return Err(CorpusError::BadMagic { path: path(), found: integer(bytes, 0).unwrap_or(first_id.into()) });
        }
        return if bytes.len().is_multiple_of(2) { Ok(0) } else { Err(length(bytes.len() as u64 + 1)) };
    }
    let (Some(version), Some(count), true) = (integer(bytes, 1), integer(bytes, 2), bytes.len() >= HEADER) else {
        return Err(length(HEADER as u64));
    };
    if version != VERSION {
        return Err(CorpusError::BadVersion { path: path(), found: version });
    }
    let expected = HEADER as u64 + 2 * u64::from(count);
    if bytes.len() as u64 != expected {
        return Err(length(expected));
    }
    if count == 0 {
        return Err(CorpusError::Empty { path: path() });
    }
    Ok(HEADER)
}

/// The `index`th 32-bit integer of a header.
fn integer(bytes: &[u8], index: usize) -> Option<u32> {
    let at = bytes.get(4 * index..)?;
    at.first_chunk().map(|&four| u32::from_le_bytes(four))
}

/// Whether the file name begins with `part` or has it between separators.
fn names_part(path: &Path, part: &str) -> bool {
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    name.starts_with(part) || name.split(['_', '-', '.']).any(|word| word == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn llm_c(magic: u32, version: u32, count: u32, ids: &[u16]) -> Vec<u8> {
        let mut bytes: Vec<u8> = [magic, version, count].iter().flat_map(|value| value.to_le_bytes()).collect();
        bytes.resize(HEADER, 0);
        bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
        bytes
    }

    fn raw(ids: &[u16]) -> Vec<u8> {
        ids.iter().flat_map(|id| id.to_le_bytes()).collect()
    }

    fn write(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    #[test]
    fn shards_of_both_layouts_join_into_one_stream() {
        let folder = tempfile::tempdir().unwrap();
        let paths = vec![
            write(folder.path(), "a.bin", &llm_c(MAGIC, 1, 3, &[1, 2, 3])),
            write(folder.path(), "b.bin", &raw(&[4, 5])),
            write(folder.path(), "c.bin", &llm_c(MAGIC, 1, 1, &[50_256])),
        ];
        let stream = open(paths).unwrap();
        assert_eq!(stream.len(), 6);
        let all = [1, 2, 3, 4, 5, 50_256];
        for start in 0..=6 {
            for end in start..=6 {
                let mut out = vec![-1];
                stream.read(start, end - start, &mut out).unwrap();
                assert_eq!(out[1..], all[start..end], "{start}..{end}");
            }
        }
        assert!(matches!(
            stream.read(4, 3, &mut Vec::new()),
            Err(CorpusError::PastTheEnd { start: 4, count: 3, len: 6 })
        ));
        assert!(stream.read(usize::MAX, 2, &mut Vec::new()).is_err());

        let (head, tail) = stream.split(4);
        let mut out = Vec::new();
        tail.read(0, 2, &mut out).unwrap();
        head.read(2, 2, &mut out).unwrap();
        assert_eq!(out, [5, 50_256, 3, 4]);
        assert!(head.read(3, 2, &mut out).is_err());
    }

    #[test]
    fn a_damaged_shard_is_named_with_what_is_wrong() {
        let folder = tempfile::tempdir().unwrap();
        let attempt = |name: &str, bytes: &[u8]| open(vec![write(folder.path(), name, bytes)]).unwrap_err();

        let error = attempt("cut.bin", &llm_c(MAGIC, 1, 5, &[1, 2, 3]));
        assert!(matches!(error, CorpusError::ShardLength { expected: 1034, found: 1030, .. }), "{error}");
        assert!(error.to_string().contains("cut.bin"), "{error}");
        let error = attempt("long.bin", &llm_c(MAGIC, 1, 2, &[1, 2, 3]));
        assert!(matches!(error, CorpusError::ShardLength { expected: 1028, found: 1030, .. }), "{error}");
        let error = attempt("negative.bin", &llm_c(MAGIC, 1, u32::MAX, &[1]));
        assert!(matches!(error, CorpusError::ShardLength { expected: 8_589_935_614, .. }), "{error}");
        let error = attempt("header.bin", &llm_c(MAGIC, 1, 5, &[])[..700]);
        assert!(matches!(error, CorpusError::ShardLength { expected: 1024, found: 700, .. }), "{error}");
        let error = attempt("odd.bin", &[1, 0, 2]);
        assert!(matches!(error, CorpusError::ShardLength { expected: 4, found: 3, .. }), "{error}");
        let error = attempt("one.bin", &[1]);
        assert!(matches!(error, CorpusError::ShardLength { expected: 2, found: 1, .. }), "{error}");
        let error = attempt("version.bin", &llm_c(MAGIC, 7, 1, &[1]));
        assert!(matches!(error, CorpusError::BadVersion { found: 7, .. }), "{error}");
        let error = attempt("llama.bin", &llm_c(20_240_801, 7, 1, &[1, 0]));
        assert!(matches!(error, CorpusError::BadMagic { found: 20_240_801, .. }), "{error}");
        let error = attempt("none.bin", &[]);
        assert!(matches!(error, CorpusError::Empty { .. }), "{error}");
        let error = attempt("zero.bin", &llm_c(MAGIC, 1, 0, &[]));
        assert!(matches!(error, CorpusError::Empty { .. }), "{error}");
    }

    #[test]
    fn an_id_outside_the_vocabulary_is_found_wherever_it_stands() {
        let folder = tempfile::tempdir().unwrap();
        let path = write(folder.path(), "a.bin", &raw(&[1, 2, 50_257, 3]));
        let stream = open(vec![path]).unwrap();
        let visit = stream.visit(|_| Ok::<(), CorpusError>(()));
        for error in [visit.unwrap_err(), stream.read(1, 3, &mut Vec::new()).unwrap_err()] {
            assert!(matches!(error, CorpusError::OutOfVocabulary { position: 2, id: 50_257, .. }), "{error}");
        }
    }

    #[test]
    fn parts_are_told_by_name_only_where_both_are_there() {
        let of = |names: &[&str]| ShardSet::of(names.iter().map(PathBuf::from).collect());
        let both = of(&["x/other.bin", "x/train.bin", "x/val.bin"]);
        assert!(matches!(both, ShardSet::Parts { train, validation } if train == [PathBuf::from("x/train.bin")]
            && validation == [PathBuf::from("x/val.bin")]));
        let llm_c = of(&["fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_val_000000.bin"]);
        assert!(matches!(llm_c, ShardSet::Parts { train, validation } if train.len() == 2 && validation.len() == 1));
        assert!(matches!(of(&["a.bin", "train01.bin"]), ShardSet::Whole(all) if all.len() == 2));
        assert!(matches!(of(&["train/a.bin", "val/a.bin"]), ShardSet::Whole(all) if all.len() == 2));
    }
}
