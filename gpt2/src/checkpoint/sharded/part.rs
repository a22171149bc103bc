//! A rank's file of a checkpoint: safetensors with a tensor of each kind a range.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::super::little_endian_bytes;

/// Bytes that are hashed and written, or read and hashed, at a time: they stay in a core's cache in between.
const AT_A_TIME: usize = 256 << 10;

/// Bytes of the length that a file begins with; its header is a whole number of as many.
const WORD: usize = 8;

/// Longest header that is written and read: some tensors of each tensor of the largest model.
const MAX_HEADER: u64 = 16 << 20;

/// A file that is being written: the values of each tensor, in order.
#[derive(Debug)]
pub(crate) struct PartWriter {
    file: File,
    hash: Sha256,
    bytes: u64,
    /// Length of the file in the end.
    whole: u64,
}

impl PartWriter {
    /// A new file at `path` for tensors of these names and lengths.
    ///
    /// # Errors
    /// The operating system's, and that the tensors are too many for a header that is read.
    pub(crate) fn create(path: &Path, tensors: &[(String, usize)]) -> io::Result<Self> {
        let (header, data) = header(tensors)?;
        let whole = header.len() as u64 + data;
        let mut writer = PartWriter { file: File::create(path)?, hash: Sha256::new(), bytes: 0, whole };
        writer.write(&header)?;
        Ok(writer)
    }

    /// The next values.
    ///
    /// # Errors
    /// The operating system's.
    pub(crate) fn values(&mut self, values: &[f32]) -> io::Result<()> {
        self.write(&little_endian_bytes(values))
    }

    /// The length of the file, which is on disk, and its SHA-256.
    ///
    /// # Errors
    /// The operating system's, and where not all values came.
    pub(crate) fn finish(self) -> io::Result<(u64, String)> {
        if self.bytes != self.whole {
            return Err(io::Error::other(format!("only {} of {} bytes could be read", self.bytes, self.whole)));
        }
        self.file.sync_all()?;
        Ok((self.bytes, comm_core::hex(&self.hash.finalize())))
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        for piece in bytes.chunks(AT_A_TIME) {
            self.hash.update(piece);
            self.file.write_all(piece)?;
        }
        self.bytes += bytes.len() as u64;
        Ok(())
    }
}

/// What the header says of a tensor.
#[derive(Serialize)]
struct Entry {
    data_offsets: [u64; 2],
    dtype: Dtype,
    shape: [usize; 1],
}

/// Bytes of an entry at most, beside its name.
const ENTRY: usize = 112;

/// The file's beginning, a whole number of words of 8 bytes, and the length of what follows.
fn header(tensors: &[(String, usize)]) -> io::Result<(Vec<u8>, u64)> {
    let mut end: u64 = 0;
    let mut entries: Vec<(&str, Entry)> = Vec::with_capacity(tensors.len());
    for (name, len) in tensors {
        let start = end;
        end += *len as u64 * size_of::<f32>() as u64;
        entries.push((name, Entry { data_offsets: [start, end], dtype: Dtype::F32, shape: [*len] }));
    }
    entries.sort_unstable_by_key(|(name, _)| *name);
    let names: usize = entries.iter().map(|(name, _)| name.len()).sum();
    let mut bytes = Vec::with_capacity(WORD + names + ENTRY * entries.len() + WORD);
    // The length of the text comes here.
    bytes.resize(WORD, 0);
    let mut before = b'{';
    for (name, entry) in &entries {
        bytes.push(before);
        serde_json::to_writer(&mut bytes, name)?;
        bytes.push(b':');
        serde_json::to_writer(&mut bytes, entry)?;
        before = b',';
    }
    if entries.is_empty() {
        bytes.push(before);
    }
    bytes.push(b'}');
    bytes.resize(bytes.len().next_multiple_of(WORD), b' ');
    let length = (bytes.len() - WORD) as u64;
    if length > MAX_HEADER {
        return Err(io::Error::other(format!(
            "the header of {} tensors has {length} bytes, and at most {MAX_HEADER} are read",
            tensors.len()
        )));
    }
    bytes[..WORD].copy_from_slice(&length.to_le_bytes());
    Ok((bytes, end))
}

/// A file that is read from.
#[derive(Debug)]
pub(super) struct PartReader {
    file: File,
    /// Where each tensor begins in the file.
    places: HashMap<String, u64>,
}

impl PartReader {
    /// The file at `path`, which is to hold tensors of these names and lengths.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn open(path: &Path, tensors: Vec<(String, usize)>) -> Result<Self, String> {
        let file = File::open(path).map_err(|error| format!("cannot be opened ({error})"))?;
        let cannot_read = |error: io::Error| format!("cannot be read ({error})");
        let mut word = [0; WORD];
        file.read_exact_at(&mut word, 0).map_err(cannot_read)?;
        let length = u64::from_le_bytes(word);
        let whole = file.metadata().map_err(cannot_read)?.len();
        if length > MAX_HEADER.min(whole.saturating_sub(8)) {
            return Err("does not begin like a safetensors file".into());
        }
        let mut header = vec![0; 8 + length as usize];
        file.read_exact_at(&mut header, 0).map_err(cannot_read)?;
        let metadata: Metadata =
            serde_json::from_slice(&header[8..]).map_err(|error| format!("is not a safetensors file ({error})"))?;
        let data = whole - 8 - length;
        let mut places = HashMap::new();
        for (name, len) in tensors {
            let is_right = |info: &&TensorInfo| {
                let (start, end) = info.data_offsets;
                let fits = end as u64 <= data && end.checked_sub(start) == len.checked_mul(size_of::<f32>());
                info.dtype == Dtype::F32 && info.shape == [len] && fits
            };
            let info = metadata.info(&name).filter(is_right);
            let info = info.ok_or_else(|| format!("has no {len} values {name:?} in f32"))?;
            places.insert(name, 8 + length + info.data_offsets.0 as u64);
        }
        Ok(PartReader { file, places })
    }

    /// Reads the values of a tensor, from its element `first` on.
    ///
    /// # Errors
    /// What is wrong with the file.
    pub(super) fn read(&self, name: &str, first: usize, values: &mut [f32]) -> Result<(), String> {
        let place = self.places.get(name).ok_or_else(|| format!("has no values {name:?}"))?;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(values);
        let read = self.file.read_exact_at(bytes, place + (first * size_of::<f32>()) as u64);
        read.map_err(|error| format!("cannot be read ({error})"))?;
        if cfg!(target_endian = "big") {
            bytes.as_chunks_mut::<4>().0.iter_mut().for_each(|value| value.reverse());
        }
        Ok(())
    }
}

/// SHA-256 of a file, in hexadecimal.
pub(super) fn sha256(path: &Path) -> io::Result<String> {
    let (mut file, mut hash) = (File::open(path)?, Sha256::new());
    let mut piece = vec![0; AT_A_TIME];
    loop {
        match file.read(&mut piece) {
            Ok(0) => return Ok(comm_core::hex(&hash.finalize())),
            Ok(count) => hash.update(&piece[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_says_where_each_tensor_is() {
        let tensors = [("b \"quoted\"", 3), ("a", 2)].map(|(name, len)| (name.to_string(), len));
        let (bytes, data) = header(&tensors).unwrap();
        assert_eq!(data, 20);
        let text = r#"{"a":{"data_offsets":[12,20],"dtype":"F32","shape":[2]},"b \"quoted\"":{"data_offsets":[0,12],"dtype":"F32","shape":[3]}}"#;
        assert_eq!(std::str::from_utf8(&bytes[WORD..]).unwrap().trim_end(), text);
        assert_eq!(bytes[..WORD], (bytes.len() as u64 - 8).to_le_bytes());
        assert!(bytes.len().is_multiple_of(WORD));
        assert_eq!(header(&[]).unwrap().0, [&[8, 0, 0, 0, 0, 0, 0, 0][..], b"{}      "].concat());
    }

    #[test]
    fn the_room_for_a_header_is_made_at_once() {
        // As long as numbers get.
        let tensors = [("a".to_string(), usize::MAX / 16), ("b".to_string(), usize::MAX / 16)];
        let (bytes, _) = header(&tensors).unwrap();
        assert!(bytes.len() <= WORD + 2 + 2 * ENTRY, "{} bytes", bytes.len());
        assert_eq!(bytes.capacity(), WORD + 2 + 2 * ENTRY + WORD);
    }

    #[test]
    fn a_header_that_would_not_be_read_is_not_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rank-0.safetensors");
        let of_name = |len: u64| ["n".repeat(len as usize)].map(|name| (name, 1usize));
        let error = PartWriter::create(&path, &of_name(MAX_HEADER)).unwrap_err().to_string();
        assert!(error.contains("the header of 1 tensors has 16777") && !path.exists(), "{error}");
        // The rest of the entry takes less than 100 bytes.
        let mut file = PartWriter::create(&path, &of_name(MAX_HEADER - 100)).unwrap();
        file.values(&[1.0]).unwrap();
        file.finish().unwrap();
        PartReader::open(&path, of_name(MAX_HEADER - 100).into()).unwrap();
    }
}
