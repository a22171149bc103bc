//! Writing shards to a folder that appears when all of them are there.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{MAX_SHARDS, Part, PrepareError};
use crate::corpus::shards;

/// What the hidden name of a folder ends with while another takes its place.
const REPLACED: &str = ".replaced";

/// The folder under its name to be, and meanwhile under another beside it.
#[derive(Debug)]
pub(super) struct Output {
    target: PathBuf,
    folder: PathBuf,
    /// The folder itself, locked: another process that writes there is refused. What one that was killed has left is not.
    lock: File,
    is_published: bool,
}

impl Output {
    /// # Errors
    /// The folder has something in it that must stay, or cannot be replaced by another, or another process writes to it, or the operating
    /// system refuses.
    ///
    /// What a process that was killed while it replaced the folder has moved away is moved back, and `restored` is called.
    pub(super) fn begin(given: &Path, overwrite: bool, restored: &mut dyn FnMut()) -> Result<Self, PrepareError> {
        let target = &real(given)?;
        let Some(name) = target.file_name() else {
            return Err(PrepareError::File { path: given.to_owned(), what: "give the folder by its name".into() });
        };
        check_free(target, overwrite)?;
        let folder = beside(target, name, ".partial");
        let at = |source| PrepareError::Write { path: folder.clone(), source };
        fs::create_dir_all(&folder).map_err(at)?;
        let lock = File::open(&folder).map_err(at)?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => PrepareError::Busy { path: target.to_owned() },
            TryLockError::Error(source) => at(source),
        })?;
        let left = fs::read_dir(&folder).and_then(|mut left| left.try_for_each(|entry| fs::remove_file(entry?.path())));
        left.map_err(at)?;
        let output = Output { target: target.clone(), folder, lock, is_published: false };
        let replaced = beside(target, name, REPLACED);
        // Nobody else is between these two names, with the lock taken.
        if !target.exists() && replaced.is_dir() {
            fs::rename(&replaced, target).map_err(|source| PrepareError::Write { path: target.clone(), source })?;
            restored();
            check_free(target, overwrite)?;
        }
        Ok(output)
    }

    /// Where the shards are written.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Gives the folder its name.
    pub(super) fn publish(mut self) -> Result<(), PrepareError> {
        let at = |source| PrepareError::Write { path: self.target.clone(), source };
        self.lock.sync_all().map_err(at)?;
        let name = self.target.file_name().unwrap_or_default();
        let replaced = beside(&self.target, name, REPLACED);
        // One that is empty is replaced by the second of these alone.
        let is_occupied = fs::read_dir(&self.target).is_ok_and(|mut entries| entries.next().is_some());
        if is_occupied {
            check_free(&self.target, true)?;
            let _ = fs::remove_dir_all(&replaced);
            fs::rename(&self.target, &replaced).map_err(at)?;
        }
        if let Err(source) = fs::rename(&self.folder, &self.target) {
            if is_occupied {
                let _ = fs::rename(&replaced, &self.target);
            }
            return Err(at(source));
        }
        self.is_published = true;
        if let Ok(parent) =
            File::open(self.target.parent().filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new(".")))
        {
            let _ = parent.sync_all();
        }
        if is_occupied {
            let _ = fs::remove_dir_all(&replaced);
        }
        Ok(())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if !self.is_published {
            // Whatever is left there is removed by the next that writes.
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

/// The folder that is meant, which a link may stand for. Where it is there, another can take its name.
fn real(given: &Path) -> Result<PathBuf, PrepareError> {
    let refused = |what: &str| PrepareError::File { path: given.to_owned(), what: what.into() };
    if given.file_name().is_none() {
        return Err(refused("give the folder by its name"));
    }
    match fs::symlink_metadata(given) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(given.to_owned()),
        Err(source) => return Err(PrepareError::Write { path: given.to_owned(), source }),
        Ok(_) => {}
    }
    let target = match given.canonicalize() {
        Ok(target) => target,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return named(given).ok_or_else(|| {
                refused("the symbolic link points to a folder that does not exist; create that folder, or give another")
            });
        }
        Err(source) => return Err(PrepareError::Write { path: given.to_owned(), source }),
    };
    let device = |path: &Path| fs::metadata(path).map(|metadata| metadata.dev());
    let is_mounted = match target.parent() {
        Some(parent) => {
            let both = device(&target).and_then(|own| Ok(own != device(parent)?));
            both.map_err(|source| PrepareError::Write { path: target.clone(), source })?
        }
        None => true,
    };
    if is_mounted {
        return Err(refused("it is a mount point, which another folder cannot replace; give a new folder inside it"));
    }
    Ok(target)
}

/// The folder that a link names, which is not there; nothing where its parent is not there either.
fn named(link: &Path) -> Option<PathBuf> {
    let parent = link.parent().filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let named = parent.join(fs::read_link(link).ok()?);
    let target = named.parent()?.canonicalize().ok()?.join(named.file_name()?);
    (!target.is_symlink()).then_some(target)
}

/// A hidden name beside `target`.
fn beside(target: &Path, name: &std::ffi::OsStr, end: &str) -> PathBuf {
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(end);
    target.with_file_name(hidden)
}

/// Refuses a folder with anything in it but shards that may be replaced.
fn check_free(target: &Path, overwrite: bool) -> Result<(), PrepareError> {
    let entries = match fs::read_dir(target) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(PrepareError::Write { path: target.to_owned(), source }),
    };
    for entry in entries {
        let entry = entry.map_err(|source| PrepareError::Write { path: target.to_owned(), source })?;
        let found = entry.file_name().to_string_lossy().into_owned();
        let advice = match is_shard(&found) {
            true if overwrite => continue,
            true => "give another folder, or --overwrite to replace the shards",
            false => "give a folder that is empty, new, or has only shards of this command",
        };
        return Err(PrepareError::Occupied { path: target.to_owned(), found, advice });
    }
    Ok(())
}

fn is_shard(name: &str) -> bool {
    let number = name.strip_suffix(".bin").and_then(|name| {
        let parts = [Part::Train, Part::Validation];
        parts.iter().find_map(|part| name.strip_prefix(part.name())?.strip_prefix('_'))
    });
    number.is_some_and(|number| number.len() == 6 && number.bytes().all(|byte| byte.is_ascii_digit()))
}

impl Part {
    /// What the names of its shards begin with.
    const fn name(self) -> &'static str {
        match self {
            Part::Train => "train",
            Part::Validation => "val",
        }
    }
}

/// The shards of both parts.
pub(super) struct Shards<'a> {
    train: Writer<'a>,
    validation: Writer<'a>,
    /// Tokens at the end that are held out.
    delay: usize,
    /// The last of them so far.
    held: VecDeque<u16>,
}

impl<'a> Shards<'a> {
    pub(super) fn new(folder: &'a Path, most: u32, delay: usize) -> Self {
        let writer = |part| Writer { folder, part, most: most.max(1), open: None, shards: 0, tokens: 0 };
        Shards { train: writer(Part::Train), validation: writer(Part::Validation), delay, held: VecDeque::new() }
    }

    pub(super) fn write(&mut self, part: Part, ids: &[u16]) -> Result<(), PrepareError> {
        match part {
            Part::Validation => self.validation.write(ids),
            Part::Train if self.delay == 0 => self.train.write(ids),
            Part::Train => {
                self.held.extend(ids);
                let leaves: Vec<u16> = self.held.drain(..self.held.len().saturating_sub(self.delay)).collect();
                self.train.write(&leaves)
            }
        }
    }

    /// Writes what is held, and returns the tokens of both parts and the number of shards.
    pub(super) fn finish(mut self) -> Result<(u64, u64, u32), PrepareError> {
        self.validation.write(self.held.make_contiguous())?;
        self.train.close()?;
        self.validation.close()?;
        Ok((self.train.tokens, self.validation.tokens, self.train.shards + self.validation.shards))
    }
}

/// The shards of a part.
struct Writer<'a> {
    folder: &'a Path,
    part: Part,
    /// Most tokens of a shard.
    most: u32,
    open: Option<Shard>,
    shards: u32,
    tokens: u64,
}

struct Shard {
    path: PathBuf,
    file: BufWriter<File>,
    tokens: u32,
}

impl Writer<'_> {
    fn write(&mut self, mut ids: &[u16]) -> Result<(), PrepareError> {
        while !ids.is_empty() {
            let most = self.most;
            let shard = match &mut self.open {
                Some(shard) => shard,
                None => {
                    let shard = self.begin()?;
                    self.open.insert(shard)
                }
            };
            let (now, later) = ids.split_at(ids.len().min((most - shard.tokens) as usize));
            let bytes: Vec<u8> = now.iter().flat_map(|id| id.to_le_bytes()).collect();
            shard.file.write_all(&bytes).map_err(|source| PrepareError::Write { path: shard.path.clone(), source })?;
            shard.tokens += now.len() as u32;
            self.tokens += now.len() as u64;
            ids = later;
            if shard.tokens == most {
                self.close()?;
            }
        }
        Ok(())
    }

    fn begin(&mut self) -> Result<Shard, PrepareError> {
        if self.shards == MAX_SHARDS {
            return Err(PrepareError::TooManyShards);
        }
        let path = self.folder.join(format!("{}_{:06}.bin", self.part.name(), self.shards));
        let begun = File::create_new(&path).map(BufWriter::new).and_then(|mut file| {
            // The number of tokens comes last.
            file.write_all(&shards::header(0))?;
            Ok(file)
        });
        let file = begun.map_err(|source| PrepareError::Write { path: path.clone(), source })?;
        self.shards += 1;
        Ok(Shard { path, file, tokens: 0 })
    }

    fn close(&mut self) -> Result<(), PrepareError> {
        let Some(Shard { path, mut file, tokens }) = self.open.take() else { return Ok(()) };
        let closed = file.seek(SeekFrom::Start(0)).and_then(|_| file.write_all(&shards::header(tokens)));
        let closed = closed.and_then(|()| file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all());
        closed.map_err(|source| PrepareError::Write { path, source })
    }
}
