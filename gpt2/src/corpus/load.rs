//! From a source to a corpus: finding files, reading, encoding, and keeping what took long.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::cache::{CacheLock, Entry, Identity, Key};
use super::documentation::{self, Documentation};
use super::shards::ShardSet;
use super::synthetic::MarkovSource;
use super::{
    Corpus, CorpusError, CorpusSource, Documents, FALLBACK_BYTES, FALLBACK_SEED, LoadOptions, LoadStatus, Origin,
    Stage, TokenCache, TokenStream, encode, formats, shards, text,
};
use crate::sys::MappedFile;
use crate::tokenizer::{END_OF_TEXT, Tokenizer, TokenizerError, TokenizerKind};

/// Loads one corpus.
pub(super) struct Loader<'a> {
    pub(super) kind: TokenizerKind,
    /// The tokenizer, of that kind, where it is given and not made for the text.
    pub(super) given: Option<&'a Tokenizer>,
    pub(super) options: &'a LoadOptions,
    pub(super) watch: &'a mut dyn FnMut(LoadStatus),
}

/// Bytes that are hashed between two signs of life.
const BLOCK: usize = 16 << 20;

impl<'a> Loader<'a> {
    pub(super) fn load(self, source: &CorpusSource) -> Result<Corpus, CorpusError> {
        match source {
            CorpusSource::Path(path) => match find(path)? {
                Input::Text(files) => {
                    let origin = Origin::Text { path: path.clone(), files: files.len() };
                    self.text_files(&files, origin)
                }
                Input::Shards(files) if self.kind == TokenizerKind::Gpt2 => self.shards(path, files),
                Input::Shards(_) => Err(CorpusError::ShardTokenizer { path: path.clone(), kind: self.kind }),
            },
            CorpusSource::Documentation { cargo_home } => match documentation::find(cargo_home.as_deref())? {
                Documentation::Found(files) => {
                    let origin = Origin::Documentation { crates: documentation::CRATES.len(), files: files.len() };
                    self.text_files(&files, origin)
                }
                Documentation::Unavailable(why) => self.synthetic(FALLBACK_SEED, FALLBACK_BYTES, Some(why)),
            },
            CorpusSource::Synthetic { seed, bytes } => self.synthetic(*seed, *bytes, None),
        }
    }

    /// Whether documents are told apart.
    fn documents(&self) -> bool {
        self.options.documents && self.kind == TokenizerKind::Gpt2
    }

    fn synthetic(mut self, seed: u64, bytes: usize, instead: Option<String>) -> Result<Corpus, CorpusError> {
        if bytes == 0 {
            return Err(CorpusError::EmptySynthetic);
        }
        let mut source = MarkovSource::new(seed);
        let origin = Origin::Synthetic { seed, entropy_rate: source.entropy_rate(), instead };
        let entry = self.encode(&source.text(bytes), &origin, &mut || ())?;
        Ok(Corpus::new(entry, origin, Documents::Unknown, None))
    }

    fn text_files(mut self, files: &[PathBuf], origin: Origin) -> Result<Corpus, CorpusError> {
        files.iter().try_for_each(|path| text::require_file(path))?;
        let entry = self.entry_of(files, &origin)?;
        let documents = match self.kind {
            TokenizerKind::Gpt2 if self.options.documents => Documents::Number(entry.documents),
            TokenizerKind::Gpt2 => Documents::PlainText,
            TokenizerKind::Bytes | TokenizerKind::Chars => Documents::Unknown,
        };
        let looks = (self.kind == TokenizerKind::Bytes).then(|| first_format(files)).flatten();
        Ok(Corpus::new(entry, origin, documents, looks))
    }

    /// The ids of `files`, from the cache where there is one and they are large enough; what is not there is made and kept.
    fn entry_of(&mut self, files: &[PathBuf], origin: &Origin) -> Result<Entry, CorpusError> {
        let identified = self.cached(files);
        let Some((cache, identity)) = identified else {
            let text = self.read(files, origin, &mut || ())?;
            return self.encode(&text, origin, &mut || ());
        };
        let source = Key::of(&[&self.how(), identity.description()]);
        let known = || cache.source(source).and_then(|key| cache.entry(Key::from_bytes(key)));
        if let Some(entry) = known() {
            return Ok(entry);
        }
        let total = identity.bytes;
        let mut lock = cache.lock(source, &mut || (self.watch)(LoadStatus { stage: Stage::Waiting, done: 0, total }));
        // Who made it while this process waited has kept it.
        if let Some(entry) = known() {
            return Ok(entry);
        }
        let text = self.read(files, origin, &mut || lock.beat())?;
        let mut hasher = Sha256::new();
        for block in text.chunks(BLOCK) {
            hasher.update(block);
            lock.beat();
        }
        let key = Key::of(&[&self.how(), &hasher.finalize()]);
        let entry = match cache.entry(key) {
            Some(entry) => entry,
            None => {
                let entry = self.encode(&text, origin, &mut || lock.beat())?;
                match cache.keep(key, &entry) {
                    Ok(()) => {
                        let total = entry.bytes;
                        (self.watch)(LoadStatus { stage: Stage::Kept, done: total, total });
                        // In the file they are shared with other ranks.
                        cache.entry(key).unwrap_or(entry)
                    }
                    Err(error) => {
                        (self.watch)(LoadStatus { stage: Stage::NotKept(error.kind()), done: 0, total });
                        entry
                    }
                }
            }
        };
        if identity.is_settled() && Identity::of(files).is_ok_and(|now| now == identity) {
            // Without it the text is read again, which is no great matter; that ids could not be kept has been said.
            let _ = cache.keep_source(source, key.bytes());
        }
        Ok(entry)
    }

    /// The cache, if there is one and `files` are large enough for it, and what they are known by there.
    fn cached(&self, files: &[PathBuf]) -> Option<(&'a TokenCache, Identity)> {
        let cache = self.options.cache.as_ref()?;
        let identity = Identity::of(files).ok()?;
        (identity.bytes >= cache.smallest()).then_some((cache, identity))
    }

    /// All that decides which ids a text has, but for the text.
    fn how(&self) -> Vec<u8> {
        let given = self.given.and_then(|tokenizer| serde_json::to_string(tokenizer).ok()).unwrap_or_default();
        let documents = if self.documents() { "documents" } else { "text" };
        let whole = if self.options.held_out { "" } else { ", whole" };
        format!("encoding 1, {}, {documents}, {given}{whole}", self.kind).into_bytes()
    }

    fn read(&mut self, files: &[PathBuf], origin: &Origin, alive: &mut dyn FnMut()) -> Result<Vec<u8>, CorpusError> {
        let total = files.iter().filter_map(|path| path.metadata().ok()).map(|metadata| metadata.len()).sum();
        let mut done = 0;
        let text = text::read_joined(files, self.kind, self.documents(), &mut |more| {
            done += more;
            alive();
            (self.watch)(LoadStatus { stage: Stage::Reading, done, total });
        })?;
        if let (Origin::Text { path, .. }, true) = (origin, text.is_empty()) {
            return Err(CorpusError::Empty { path: path.clone() });
        }
        Ok(text)
    }

    fn encode(&mut self, text: &[u8], origin: &Origin, alive: &mut dyn FnMut()) -> Result<Entry, CorpusError> {
        let encoded = self.parts(text, alive);
        let (tokenizer, train, validation, documents) =
            encoded.map_err(|source| CorpusError::Encode { origin: origin.to_string(), source })?;
        let vocab = tokenizer.vocab_size();
        let (train, validation) = (TokenStream::in_memory(train, vocab), TokenStream::in_memory(validation, vocab));
        let hash = hash(&tokenizer, &train, &validation, &mut |_| alive())?;
        Ok(Entry { tokenizer, train, validation, hash, bytes: text.len() as u64, documents })
    }

    /// The ids of both parts of `text`, what encoded them, and the number of documents.
    fn parts(
        &mut self,
        text: &[u8],
        alive: &mut dyn FnMut(),
    ) -> Result<(Tokenizer, Vec<u16>, Vec<u16>, u64), TokenizerError> {
        let (kind, documents) = (self.kind, self.documents());
        let tokenizer = match (self.given, kind) {
            (Some(given), _) => given.clone(),
            (None, TokenizerKind::Gpt2) => Tokenizer::gpt2(),
            (None, TokenizerKind::Bytes) => Tokenizer::bytes(),
            (None, TokenizerKind::Chars) => Tokenizer::chars_of(text::utf8(text, kind)?)?,
        };
        if kind == TokenizerKind::Bytes {
            let at = if self.options.held_out { nine_tenths(text.len()) } else { text.len() };
            let (train, validation) = text.split_at(at);
            let (train, validation) = (tokenizer.encode_bytes(train)?, tokenizer.encode_bytes(validation)?);
            return Ok((tokenizer, train, validation, 0));
        }
        let text = text::utf8(text, kind)?;
        let at = if self.options.held_out { held_out_from(text, documents) } else { text.len() };
        let (mut done, total) = (0, text.len() as u64);
        let mut watch = |more: usize| {
            done += more as u64;
            alive();
            (self.watch)(LoadStatus { stage: Stage::Encoding, done, total });
        };
        watch(0);
        let train = encode::encode(&tokenizer, &text[..at], 0, documents, &mut watch)?;
        let validation = encode::encode(&tokenizer, &text[at..], at, documents, &mut watch)?;
        let number = if documents {
            text.split(END_OF_TEXT).filter(|document| !document.trim_ascii().is_empty()).count() as u64
        } else {
            0
        };
        Ok((tokenizer, train, validation, number))
    }

    fn shards(mut self, path: &Path, files: Vec<PathBuf>) -> Result<Corpus, CorpusError> {
        let set = if self.options.held_out { ShardSet::of(files) } else { ShardSet::Whole(files) };
        let files: Vec<PathBuf> = match &set {
            ShardSet::Whole(files) => files.clone(),
            ShardSet::Parts { train, validation } => [train.as_slice(), validation].concat(),
        };
        other_vocabulary(&files)?;
        let (train, validation) = match set {
            ShardSet::Whole(files) => {
                let stream = shards::open(files)?;
                let at = if self.options.held_out { nine_tenths(stream.len()) } else { stream.len() };
                stream.split(at)
            }
            ShardSet::Parts { train, validation } => (shards::open(train)?, shards::open(validation)?),
        };
        let (tokenizer, bytes) = (Tokenizer::gpt2(), 2 * (train.len() + validation.len()) as u64);
        let hash = self.hash_of_shards(&files, &tokenizer, &train, &validation)?;
        let entry = Entry { tokenizer, train, validation, hash, bytes, documents: 0 };
        let origin = Origin::Shards { path: path.to_owned(), files: files.len() };
        Ok(Corpus::new(entry, origin, Documents::Unknown, None))
    }

    /// The hash of all ids, from the cache where the shards have not changed since it was computed; ids are checked by whoever computes it,
    /// and again by whoever reads them.
    fn hash_of_shards(
        &mut self,
        files: &[PathBuf],
        tokenizer: &Tokenizer,
        train: &TokenStream,
        validation: &TokenStream,
    ) -> Result<[u8; 32], CorpusError> {
        let total = 2 * (train.len() + validation.len()) as u64;
        let mut done = 0;
        let mut checking = |more: usize, watch: &mut dyn FnMut(LoadStatus)| {
            done += more as u64;
            watch(LoadStatus { stage: Stage::Checking, done, total });
        };
        let identified = self.cached(files);
        let Some((cache, identity)) = identified else {
            return hash(tokenizer, train, validation, &mut |more| checking(more, &mut self.watch));
        };
        let lengths = [train.len(), validation.len()].map(|length| (length as u64).to_le_bytes()).concat();
        let key = Key::of(&[b"shards 1", &lengths, identity.description()]);
        if let Some(hash) = cache.source(key) {
            return Ok(hash);
        }
        // What cannot be noted need not be waited for.
        let settled = identity.is_settled();
        let mut lock = settled
            .then(|| cache.lock(key, &mut || (self.watch)(LoadStatus { stage: Stage::Waiting, done: 0, total })));
        if let Some(hash) = cache.source(key) {
            return Ok(hash);
        }
        let hash = hash(tokenizer, train, validation, &mut |more| {
            lock.iter_mut().for_each(CacheLock::beat);
            checking(more, &mut self.watch);
        })?;
        if settled && Identity::of(files).is_ok_and(|now| now == identity) {
            let kept = cache.keep_source(key, &hash);
            if let Err(error) = kept {
                (self.watch)(LoadStatus { stage: Stage::NotKept(error.kind()), done: 0, total });
            }
        }
        Ok(hash)
    }
}

/// [`Corpus::hash`]; `done` hears of bytes of ids.
fn hash(
    tokenizer: &Tokenizer,
    train: &TokenStream,
    validation: &TokenStream,
    done: &mut dyn FnMut(usize),
) -> Result<[u8; 32], CorpusError> {
    let mut hasher = Sha256::new();
    hasher.update(b"token corpus 1\0");
    hasher.update(tokenizer.kind().to_string());
    for number in [tokenizer.vocab_size(), train.len(), validation.len()] {
        hasher.update((number as u64).to_le_bytes());
    }
    for part in [train, validation] {
        part.visit(|ids| {
            hasher.update(ids);
            done(ids.len());
            Ok::<(), CorpusError>(())
        })?;
    }
    Ok(hasher.finalize().into())
}

enum Input {
    Text(Vec<PathBuf>),
    Shards(Vec<PathBuf>),
}

/// The files that `path` stands for.
fn find(path: &Path) -> Result<Input, CorpusError> {
    let metadata = std::fs::metadata(path).map_err(|source| match source.kind() {
        ErrorKind::NotFound => CorpusError::Missing { path: path.to_owned() },
        _ => CorpusError::Read { path: path.to_owned(), source },
    })?;
    if !metadata.is_dir() {
        let files = vec![path.to_owned()];
        return Ok(if text::has_extension(path, &["bin"]) { Input::Shards(files) } else { Input::Text(files) });
    }
    let shards = text::files_below(path, &["bin"])?;
    if !shards.is_empty() {
        if path.join(VOCABULARY).exists() {
            return Err(CorpusError::OtherVocabulary { path: path.to_owned() });
        }
        return Ok(Input::Shards(shards));
    }
    let files = text::files_below(path, &["txt", "md"])?;
    if files.is_empty() {
        return Err(CorpusError::NothingInFolder { path: path.to_owned() });
    }
    Ok(Input::Text(files))
}

/// What nanoGPT writes beside shards whose ids are its own.
const VOCABULARY: &str = "meta.pkl";

/// That no shard lies beside the table of another vocabulary, nor what a link to a shard leads to.
fn other_vocabulary(shards: &[PathBuf]) -> Result<(), CorpusError> {
    let mut seen = std::collections::HashSet::new();
    for shard in shards {
        let target = shard.canonicalize().unwrap_or_else(|_| shard.clone());
        for folder in [shard.parent(), target.parent()].into_iter().flatten() {
            if seen.insert(folder.to_owned()) && folder.join(VOCABULARY).exists() {
                // The folder of a bare file name is the current one.
                let path = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
                return Err(CorpusError::OtherVocabulary { path: path.to_owned() });
            }
        }
    }
    Ok(())
}

/// The format that the first of `files` looks like that looks like any.
fn first_format(files: &[PathBuf]) -> Option<&'static str> {
    let of = |path: &PathBuf| formats::known(MappedFile::open(path).ok()?.bytes());
    files.iter().find_map(of).map(|format| format.name)
}

/// The byte at which the held-out part of `text` begins: after nine tenths of the characters, and with `documents` not inside the mark
/// between two of them.
fn held_out_from(text: &str, documents: bool) -> usize {
    let at = nine_tenths(text.chars().count());
    let at = text.char_indices().nth(at).map_or(text.len(), |(offset, _)| offset);
    if !documents {
        return at;
    }
    let near = at.saturating_sub(END_OF_TEXT.len() - 1)..at;
    let mark = near.rev().find(|&from| text.as_bytes()[from..].starts_with(END_OF_TEXT.as_bytes()));
    mark.map_or(at, |from| from + END_OF_TEXT.len())
}

/// `⌊0.9 · len⌋`, without overflow.
pub(super) fn nine_tenths(len: usize) -> usize {
    len / 10 * 9 + len % 10 * 9 / 10
}
