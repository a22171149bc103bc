//! A stream of token ids, in memory or in mapped shards, that can be cut into parts without a copy.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use super::CorpusError;
use crate::sys::MappedFile;

/// A run of token ids, each below the vocabulary's size. Cheap to clone: parts share their storage.
#[derive(Clone, Debug)]
pub struct TokenStream {
    pieces: Arc<[Piece]>,
    start: usize,
    len: usize,
    vocab: usize,
}

/// A contiguous part of the storage, `len` tokens from token number `first` on.
#[derive(Debug)]
struct Piece {
    data: Data,
    first: usize,
    len: usize,
}

#[derive(Debug)]
enum Data {
    Memory(Vec<u16>),
    /// Little-endian 16-bit ids after `header` bytes; `header + 2 * len` bytes were there when it was mapped.
    Shard {
        path: PathBuf,
        file: MappedFile,
        header: usize,
    },
}

impl TokenStream {
    /// A stream over ids in memory.
    pub(super) fn in_memory(tokens: Vec<u16>, vocab: usize) -> Self {
        let len = tokens.len();
        Self { pieces: Arc::from([Piece { data: Data::Memory(tokens), first: 0, len }]), start: 0, len, vocab }
    }

    /// A stream over shards one after the other, each given as its path, its mapping and the bytes of its header.
    pub(super) fn mapped(shards: Vec<(PathBuf, MappedFile, usize)>, vocab: usize) -> Self {
        let mut first = 0;
        let pieces = shards
            .into_iter()
            .map(|(path, file, header)| {
                let len = file.bytes().len().saturating_sub(header) / 2;
                let piece = Piece { data: Data::Shard { path, file, header }, first, len };
                first += len;
                piece
            })
            .collect();
        Self { pieces, start: 0, len: first, vocab }
    }

    /// The first `at` tokens and the rest; `at` is cut to the length.
    pub(super) fn split(self, at: usize) -> (Self, Self) {
        let at = at.min(self.len);
        let rest = Self { start: self.start + at, len: self.len - at, ..self.clone() };
        (Self { len: at, ..self }, rest)
    }

    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends `count` ids from token number `start` on to `out`.
    ///
    /// # Errors
    /// [`CorpusError::PastTheEnd`] where the stream is shorter, and [`CorpusError::OutOfVocabulary`] where a shard was
    /// rewritten after it was opened.
    pub fn read(&self, start: usize, count: usize, out: &mut Vec<i32>) -> Result<(), CorpusError> {
        self.runs(start, count, |piece, from, run| {
            out.reserve(run);
            match &piece.data {
                Data::Memory(tokens) => out.extend(tokens.iter().skip(from).take(run).map(|&id| i32::from(id))),
                Data::Shard { path, .. } => {
                    for (index, id) in piece.shard_ids(from, run).enumerate() {
                        self.check(path, from + index, id)?;
                        out.push(i32::from(id));
                    }
                }
            }
            Ok(())
        })
    }

    /// Hands all ids, as little-endian 16-bit numbers, to `take` in blocks, and checks each against the vocabulary on the way.
    pub(super) fn visit<E: From<CorpusError>>(&self, mut take: impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
        const RUN: usize = 32 * 1024;
        let mut bytes = Vec::with_capacity(2 * RUN);
        let mut start = 0;
        while start < self.len {
            let count = RUN.min(self.len - start);
            bytes.clear();
            self.runs(start, count, |piece, from, run| {
                match &piece.data {
                    Data::Memory(tokens) => {
                        bytes.extend(tokens.iter().skip(from).take(run).flat_map(|id| id.to_le_bytes()));
                    }
                    Data::Shard { path, .. } => {
                        for (index, id) in piece.shard_ids(from, run).enumerate() {
                            self.check(path, from + index, id)?;
                            bytes.extend_from_slice(&id.to_le_bytes());
                        }
                    }
                }
                Ok(())
            })?;
            take(&bytes)?;
            start += count;
        }
        Ok(())
    }

    /// Calls `visit` with each piece that holds some of `count` tokens from `start` on, the place of the first within
    /// the piece, and how many.
    fn runs(
        &self,
        start: usize,
        count: usize,
        mut visit: impl FnMut(&Piece, usize, usize) -> Result<(), CorpusError>,
    ) -> Result<(), CorpusError> {
        if start.checked_add(count).is_none_or(|end| end > self.len) {
            return Err(CorpusError::PastTheEnd { start, count, len: self.len });
        }
        let mut next = self.start + start;
        let end = next + count;
        let holder = self.pieces.partition_point(|piece| piece.first + piece.len <= next);
        for piece in self.pieces.iter().skip(holder) {
            if next == end {
                break;
            }
            let run = (end - next).min(piece.first + piece.len - next);
            visit(piece, next - piece.first, run)?;
            next += run;
        }
        Ok(())
    }

    fn check(&self, path: &Path, position: usize, id: u16) -> Result<(), CorpusError> {
        if usize::from(id) < self.vocab {
            return Ok(());
        }
        Err(CorpusError::OutOfVocabulary { path: path.to_owned(), position, id, vocab: self.vocab })
    }
}

impl Piece {
    /// `run` ids of a shard from its `from`th on; none for ids in memory.
    fn shard_ids(&self, from: usize, run: usize) -> impl Iterator<Item = u16> {
        let bytes = match &self.data {
            Data::Shard { file, header, .. } => {
                let begin = header + 2 * from;
                file.bytes().get(begin..begin + 2 * run).unwrap_or_default()
            }
            Data::Memory(_) => &[],
        };
        let (pairs, _) = bytes.as_chunks::<2>();
        pairs.iter().map(|&pair| u16::from_le_bytes(pair))
    }
}
