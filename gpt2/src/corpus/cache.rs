//! Ids of large texts, kept between runs and shared by the ranks of a machine.
//!
//! Three kinds of files lie in the folder, each named by a SHA-256 in hexadecimal digits:
//!
//! - `.ids`: the ids of a text, under the hash of the text and of all that decides how it is encoded. Readers map it into memory.
//! - `.source`: which hash that is, or the hash of a set of shards, under what the operating system says of the files (see [`Identity`]), so
//!   that files which nobody has changed are not read again.
//! - `.lock`: there while a process makes the first two. It holds that process's progress.
//!
//! Files appear whole, by renaming. What does not agree with its checksum, its name or its length counts for nothing and is written anew. Where
//! nothing can be written everything works as without a cache.
//!
//! A checksum shows damage, not malice: whoever may write into the folder could leave other ids under a text's key. So only files of this
//! process's user, of root and of the folder's owner count, whom the user trusts by using the folder. Others may read what is kept (unless the
//! umask forbids it), so that a folder can be filled by its owner for many.

use std::fs::{self, File, TryLockError};
use std::io::{self, BufWriter, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use super::CorpusError;
use super::tokens::TokenStream;
use crate::sys::{self, MappedFile};
use crate::tokenizer::Tokenizer;

/// Where ids are kept, for which texts, and how much of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenCache {
    folder: PathBuf,
    smallest: u64,
    largest: u64,
}

/// Bytes of text below which encoding takes no time worth a file.
const SMALLEST: u64 = 2 << 20;

/// Bytes of all files together, beyond which those go that were not used for the longest time.
const LARGEST: u64 = 8 << 30;

/// How long to wait for another process that encodes the same text and gets no further.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the name of a file in the cache stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key([u8; 32]);

/// A text's ids, as they are kept.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) tokenizer: Tokenizer,
    pub(super) train: TokenStream,
    pub(super) validation: TokenStream,
    /// [`Corpus::hash`](super::Corpus::hash).
    pub(super) hash: [u8; 32],
    /// Bytes of the text.
    pub(super) bytes: u64,
    pub(super) documents: u64,
}

impl TokenCache {
    /// A cache in `folder`, which need not be there yet, for texts and shards of 2 MiB and more, of 8 GiB at most.
    #[must_use]
    pub fn new(folder: PathBuf) -> Self {
        Self { folder, smallest: SMALLEST, largest: LARGEST }
    }

    /// The user's: in [`user_cache_folder`](crate::env::user_cache_folder), below `isocomm/tokens`; `None` where there is no such folder.
    #[must_use]
    pub fn of_user() -> Option<Self> {
        crate::env::user_cache_folder().map(|folder| Self::new(folder.join("isocomm").join("tokens")))
    }

    /// For texts and shards of `bytes` and more.
    #[must_use]
    pub fn from_bytes(self, bytes: u64) -> Self {
        Self { smallest: bytes, ..self }
    }

    /// Of `bytes` at most; what was written last stays in any case.
    #[must_use]
    pub fn up_to_bytes(self, bytes: u64) -> Self {
        Self { largest: bytes, ..self }
    }

    /// The folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The smallest text or set of shards that this cache is for.
    #[must_use]
    pub fn smallest(&self) -> u64 {
        self.smallest
    }

    /// The hash under which the contents of files are known, if they are.
    pub(super) fn source(&self, key: Key) -> Option<[u8; 32]> {
        let mut file = self.open_trusted(&self.path(key, SOURCE))?;
        // One byte more than there may be shows a file that is too long.
        let mut bytes = Vec::with_capacity(SOURCE_BYTES + 1);
        Read::by_ref(&mut file).take(SOURCE_BYTES as u64 + 1).read_to_end(&mut bytes).ok()?;
        let (body, sum) = bytes.split_last_chunk::<4>()?;
        let value = body.strip_prefix(SOURCE_LABEL)?.strip_prefix(&key.0)?;
        let value = value.try_into().ok()?;
        let value = (crc32c::crc32c(body) == u32::from_le_bytes(*sum)).then_some(value)?;
        // Those that are not used for long go.
        let _ = file.set_modified(SystemTime::now());
        Some(value)
    }

    /// Notes that hash, and makes room.
    ///
    /// # Errors
    /// The operating system's, with nothing changed.
    pub(super) fn keep_source(&self, key: Key, value: &[u8; 32]) -> io::Result<()> {
        let mut bytes = [SOURCE_LABEL, key.0.as_slice(), value].concat();
        bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
        self.write(|file| file.write_all(&bytes))?.persist(self.path(key, SOURCE))?;
        self.make_room(None);
        Ok(())
    }

    /// The ids under `key`, if they are there and whole.
    pub(super) fn entry(&self, key: Key) -> Option<Entry> {
        let path = self.path(key, IDS);
        let file = self.open_trusted(&path)?;
        let entry = read_entry(key, path, MappedFile::of(&file).ok()?)?;
        // The time of the last use decides which goes first.
        let _ = file.set_modified(SystemTime::now());
        Some(entry)
    }

    /// The file at `path`, if it belongs to a user whose ids are trusted.
    fn open_trusted(&self, path: &Path) -> Option<File> {
        // A pipe would be waited for.
        let file = path.metadata().ok().filter(fs::Metadata::is_file).and_then(|_| File::open(path).ok())?;
        let (owner, of_folder) = (file.metadata().ok()?.uid(), self.folder.metadata().ok()?.uid());
        [0, of_folder, sys::user_id()].contains(&owner).then_some(file)
    }

    /// Writes `entry`, unless it is there and whole, and makes room by removing what was not used for the longest time.
    ///
    /// # Errors
    /// The operating system's, with nothing changed.
    pub(super) fn keep(&self, key: Key, entry: &Entry) -> io::Result<()> {
        let vocabulary = serde_json::to_vec(&entry.tokenizer)?;
        let mut fixed = [IDS_LABEL, key.0.as_slice(), &entry.hash].concat();
        let counts = [entry.train.len(), entry.validation.len(), vocabulary.len()].map(|count| count as u64);
        for number in counts.into_iter().chain([entry.bytes, entry.documents]) {
            fixed.extend(number.to_le_bytes());
        }
        let mut sum = crc32c::crc32c_append(crc32c::crc32c(&fixed), &vocabulary);
        let parts = [&entry.train, &entry.validation];
        for part in parts {
            part.visit(|ids| {
                sum = crc32c::crc32c_append(sum, ids);
                Ok::<(), Failure>(())
            })?;
        }
        let written = self.write(|file| {
            file.write_all(&fixed)?;
            file.write_all(&sum.to_le_bytes())?;
            file.write_all(&vocabulary)?;
            parts.into_iter().try_for_each(|part| part.visit(|ids| Ok::<(), Failure>(file.write_all(ids)?)))?;
            Ok(())
        })?;
        let path = self.path(key, IDS);
        // One that waited in vain for another that got no further in a minute may come second.
        if self.entry(key).is_none() {
            written.persist(&path)?;
        }
        self.make_room(Some(&path));
        Ok(())
    }

    /// Waits until no other process makes what belongs to `key`, and says so to them in turn. `waiting` is called now and then meanwhile.
    /// Where files cannot be locked, or the other makes no progress, it goes on without.
    pub(super) fn lock(&self, key: Key, waiting: &mut dyn FnMut()) -> CacheLock {
        self.lock_within(key, PATIENCE, waiting)
    }

    fn lock_within(&self, key: Key, patience: Duration, waiting: &mut dyn FnMut()) -> CacheLock {
        let path = self.path(key, LOCK);
        let nobody = CacheLock { held: None, beats: 0 };
        let open = || {
            fs::create_dir_all(&self.folder)?;
            File::options().read(true).write(true).create(true).truncate(false).open(&path)
        };
        let Ok(mut file) = open() else { return nobody };
        let (mut seen, mut since) = (None, Instant::now());
        loop {
            match file.try_lock() {
                Ok(()) => return CacheLock { held: Some((file, path)), beats: 0 },
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(_)) => return nobody,
            }
            let beat = beat_of(&mut file);
            if beat != seen {
                (seen, since) = (beat, Instant::now());
            }
            if since.elapsed() > patience {
                return nobody;
            }
            waiting();
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn path(&self, key: Key, extension: &str) -> PathBuf {
        self.folder.join(format!("{}.{extension}", comm_core::hex(&key.0)))
    }

    /// Writes a whole file that has yet to get its name.
    fn write(&self, fill: impl FnOnce(&mut BufWriter<&mut File>) -> io::Result<()>) -> io::Result<NamedTempFile> {
        // Less what the umask takes away.
        let all = fs::Permissions::from_mode(0o666);
        fs::create_dir_all(&self.folder)?;
        let mut file = tempfile::Builder::new().prefix(TEMPORARY).permissions(all).tempfile_in(&self.folder)?;
        let mut writer = BufWriter::new(file.as_file_mut());
        fill(&mut writer)?;
        writer.flush()?;
        drop(writer);
        Ok(file)
    }

    /// Removes what is left of processes that were killed, notes that nobody has used for long, and the ids used least recently while there are
    /// too many, but for `newest`. Processes that have them mapped keep them until they end.
    fn make_room(&self, newest: Option<&Path>) {
        const LEFT_OVER: Duration = Duration::from_secs(24 * 3600);
        const UNUSED_NOTE: Duration = Duration::from_secs(90 * 24 * 3600);
        let Ok(files) = fs::read_dir(&self.folder) else { return };
        let mut ids = Vec::new();
        for file in files.flatten() {
            let (path, Ok(metadata)) = (file.path(), file.metadata()) else { continue };
            let Ok(modified) = metadata.modified() else { continue };
            let name = file.file_name();
            let extension = path.extension().unwrap_or_default();
            let older_than = |limit| modified.elapsed().is_ok_and(|age| age > limit);
            if extension == IDS {
                ids.push((modified, metadata.len(), path));
            } else if extension == SOURCE {
                if older_than(UNUSED_NOTE) {
                    let _ = fs::remove_file(path);
                }
            } else if older_than(LEFT_OVER)
                && (extension == LOCK || name.as_encoded_bytes().starts_with(TEMPORARY.as_bytes()))
            {
                let _ = fs::remove_file(path);
            }
        }
        ids.sort_unstable();
        let mut total: u64 = ids.iter().map(|(_, bytes, _)| bytes).sum();
        for (_, bytes, path) in ids.iter().filter(|(.., path)| Some(path.as_path()) != newest) {
            if total <= self.largest {
                break;
            }
            if fs::remove_file(path).is_ok() {
                total -= bytes;
            }
        }
    }
}

const IDS: &str = "ids";
const SOURCE: &str = "source";
const LOCK: &str = "lock";
const TEMPORARY: &str = ".writing-";

/// Labels change with the layout of a file, and with how texts are encoded.
const IDS_LABEL: &[u8] = b"isocomm ids 1\0\0\0";
const SOURCE_LABEL: &[u8] = b"isocomm source 1";
const SOURCE_BYTES: usize = 16 + 32 + 32 + 4;

/// Before the vocabulary: label, key, hash, five counts, checksum.
const IDS_HEADER: usize = 16 + 32 + 32 + 5 * 8 + 4;

fn read_entry(key: Key, path: PathBuf, file: MappedFile) -> Option<Entry> {
    let bytes = file.bytes();
    let (header, rest) = bytes.split_at_checked(IDS_HEADER)?;
    let (fixed, sum) = header.split_last_chunk::<4>()?;
    let (hash, counts) = fixed.strip_prefix(IDS_LABEL)?.strip_prefix(&key.0)?.split_first_chunk::<32>()?;
    let counts: Vec<u64> = counts.as_chunks::<8>().0.iter().map(|&eight| u64::from_le_bytes(eight)).collect();
    let [train, validation, vocabulary, text_bytes, documents] = counts[..] else { return None };
    let ids = train.checked_add(validation)?.checked_mul(2)?;
    if ids.checked_add(vocabulary)? != rest.len() as u64 {
        return None;
    }
    let seen = crc32c::crc32c_append(crc32c::crc32c(fixed), rest);
    if seen != u32::from_le_bytes(*sum) {
        return None;
    }
    let vocabulary = usize::try_from(vocabulary).ok()?;
    let tokenizer: Tokenizer = serde_json::from_slice(rest.get(..vocabulary)?).ok()?;
    let (hash, vocab) = (*hash, tokenizer.vocab_size());
    let stream = TokenStream::mapped(vec![(path, file, IDS_HEADER + vocabulary)], vocab);
    let (train, validation) = stream.split(usize::try_from(train).ok()?);
    Some(Entry { tokenizer, train, validation, hash, bytes: text_bytes, documents })
}

/// The right to make what belongs to a key, until dropped.
pub(super) struct CacheLock {
    held: Option<(File, PathBuf)>,
    beats: u64,
}

impl CacheLock {
    /// Shows others that this process gets on.
    pub(super) fn beat(&mut self) {
        if let Some((file, _)) = &mut self.held {
            self.beats += 1;
            // A process that cannot see it waits for a minute at most.
            let _ = file.rewind().and_then(|()| file.write_all(&self.beats.to_le_bytes()));
        }
    }
}

impl Drop for CacheLock {
    fn drop(&mut self) {
        if let Some((_, path)) = &self.held {
            // Those who wait have it open; who gets the lock looks into the cache before anything else.
            let _ = fs::remove_file(path);
        }
    }
}

fn beat_of(file: &mut File) -> Option<u64> {
    let mut bytes = [0; 8];
    file.rewind().and_then(|()| file.read_exact(&mut bytes)).ok()?;
    Some(u64::from_le_bytes(bytes))
}

impl Key {
    /// A key of `parts`, which differ where any of them do.
    pub(super) fn of(parts: &[&[u8]]) -> Self {
        let mut hasher = Sha256::new();
        for part in parts {
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        Self(hasher.finalize().into())
    }

    pub(super) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    pub(super) fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

/// What tells whether files are those that were read before, without reading them: number and device, length, times of the last change of
/// contents and of anything, and of large files three samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    description: Vec<u8>,
    /// Bytes of all files.
    pub(super) bytes: u64,
    newest: SystemTime,
}

impl Identity {
    pub(super) fn of<'a>(files: impl IntoIterator<Item = &'a PathBuf>) -> io::Result<Self> {
        let mut identity = Self { description: Vec::new(), bytes: 0, newest: SystemTime::UNIX_EPOCH };
        for path in files {
            identity.add(path)?;
        }
        Ok(identity)
    }

    pub(super) fn description(&self) -> &[u8] {
        &self.description
    }

    /// Whether a change from now on would show. Within the resolution of a file system's times, which is some milliseconds, or two seconds on
    /// FAT, it might not.
    pub(super) fn is_settled(&self) -> bool {
        self.newest.elapsed().is_ok_and(|age| age > Duration::from_secs(3))
    }

    fn add(&mut self, path: &Path) -> io::Result<()> {
        const SAMPLE: u64 = 4096;
        let metadata = fs::metadata(path)?;
        let length = metadata.len();
        let modified = metadata.modified()?;
        self.bytes += length;
        self.newest = self.newest.max(modified);
        let nanoseconds = |time: SystemTime| {
            time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos()).to_le_bytes()
        };
        self.description.extend(length.to_le_bytes());
        self.description.extend(nanoseconds(modified));
        for number in [metadata.dev(), metadata.ino()] {
            self.description.extend(number.to_le_bytes());
        }
        let changed = Duration::new(
            u64::try_from(metadata.ctime()).unwrap_or(0),
            u32::try_from(metadata.ctime_nsec()).unwrap_or(0),
        );
        let changed = SystemTime::UNIX_EPOCH.checked_add(changed).unwrap_or(modified);
        self.newest = self.newest.max(changed);
        self.description.extend(nanoseconds(changed));
        if length >= 16 * SAMPLE {
            let mut file = File::open(path)?;
            let mut sample = Vec::with_capacity(SAMPLE as usize);
            for at in [0, length / 2, length - SAMPLE] {
                file.seek(io::SeekFrom::Start(at))?;
                sample.clear();
                Read::by_ref(&mut file).take(SAMPLE).read_to_end(&mut sample)?;
                self.description.extend(Sha256::digest(&sample));
            }
        }
        Ok(())
    }
}

/// Either of the two things that can go wrong while ids are written.
struct Failure(io::Error);

impl From<CorpusError> for Failure {
    fn from(error: CorpusError) -> Self {
        Self(io::Error::other(error))
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self(error)
    }
}

impl From<Failure> for io::Error {
    fn from(failure: Failure) -> Self {
        failure.0
    }
}

#[cfg(test)]
mod tests;
