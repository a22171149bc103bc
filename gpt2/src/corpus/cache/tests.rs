use std::os::unix::fs::PermissionsExt as _;
use std::sync::atomic::{AtomicUsize, Ordering};

use comm_core::conformance::Barrier;

use super::*;
use crate::corpus::{Corpus, CorpusSource, LoadOptions, LoadStatus, Stage};
use crate::tokenizer::TokenizerKind;

/// A text, a folder for a cache, and what it takes to load the one with the other.
struct Bench {
    folder: tempfile::TempDir,
    options: LoadOptions,
}

impl Bench {
    fn new(text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let bench = Bench {
            options: LoadOptions {
                cache: Some(TokenCache::new(folder.path().join("cache/tokens")).from_bytes(1)),
                ..LoadOptions::default()
            },
            folder,
        };
        bench.write(text);
        bench
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("t.txt")
    }

    fn cache(&self) -> &TokenCache {
        self.options.cache.as_ref().unwrap()
    }

    /// Replaces the text.
    fn write(&self, text: &str) {
        fs::write(self.path(), text).unwrap();
    }

    fn load(&self, kind: TokenizerKind) -> (Corpus, Vec<Stage>) {
        self.load_as(kind, &self.options)
    }

    /// The corpus and the stages of loading it.
    fn load_as(&self, kind: TokenizerKind, options: &LoadOptions) -> (Corpus, Vec<Stage>) {
        let mut stages = Vec::new();
        let mut watch = |loading: LoadStatus| {
            assert!(loading.done <= loading.total);
            stages.push(loading.stage);
        };
        let corpus = Corpus::load_as(&CorpusSource::Path(self.path()), kind, options, &mut watch).unwrap();
        (corpus, stages)
    }

    fn files(&self, extension: &str) -> Vec<PathBuf> {
        let files = fs::read_dir(self.cache().folder()).unwrap().map(|file| file.unwrap().path());
        files.filter(|path| path.extension().is_some_and(|found| found == extension)).collect()
    }
}

fn all(corpus: &Corpus) -> (Vec<i32>, Vec<i32>, String, u64, Option<u64>) {
    let part = |stream: &TokenStream| {
        let mut ids = Vec::new();
        stream.read(0, stream.len(), &mut ids).unwrap();
        ids
    };
    (part(corpus.train()), part(corpus.validation()), corpus.hash_hex(), corpus.bytes(), corpus.documents())
}

const TEXT: &str = "Once upon a time<|endoftext|>there was ein Bär, 熊.\n";

#[test]
fn a_text_is_encoded_once_and_has_the_same_ids_from_the_cache() {
    for kind in [TokenizerKind::Gpt2, TokenizerKind::Bytes, TokenizerKind::Chars] {
        let bench = Bench::new(&TEXT.repeat(20));
        let (plain, _) = bench.load_as(kind, &LoadOptions::default());
        let (first, stages) = bench.load(kind);
        assert!(stages.contains(&Stage::Kept), "{kind}: {stages:?}");
        let (second, stages) = bench.load(kind);
        assert!(!stages.contains(&Stage::Encoding) && !stages.contains(&Stage::Kept), "{kind}: {stages:?}");
        for corpus in [&first, &second] {
            assert_eq!(all(corpus), all(&plain), "{kind}");
            assert_eq!(corpus.tokenizer(), plain.tokenizer());
            assert_eq!(corpus.describe(), plain.describe());
        }
        assert_eq!((bench.files("ids").len(), bench.files("lock").len()), (1, 0));
    }
}

#[test]
fn text_tokenizer_and_options_are_told_apart() {
    let bench = Bench::new(TEXT);
    let plain = LoadOptions { documents: false, ..bench.options.clone() };
    let mut hashes = vec![
        bench.load(TokenizerKind::Gpt2).0.hash(),
        bench.load_as(TokenizerKind::Gpt2, &plain).0.hash(),
        bench.load(TokenizerKind::Chars).0.hash(),
        bench.load(TokenizerKind::Bytes).0.hash(),
    ];
    // As long as the other.
    bench.write(&TEXT.replace("time", "mite"));
    hashes.push(bench.load(TokenizerKind::Gpt2).0.hash());
    for (index, hash) in hashes.iter().enumerate() {
        assert!(!hashes[..index].contains(hash), "{index}");
    }
    assert_eq!(bench.files("ids").len(), 5);
    // A checkpoint's characters are not those of the text.
    let other = Bench::new("abcabcabcabc");
    let known = Tokenizer::chars_of("abcdef").unwrap();
    assert_eq!(other.load(TokenizerKind::Chars).0.vocab_size(), 3);
    assert_eq!(
        Corpus::load_with(&CorpusSource::Path(other.path()), &known, &LoadOptions::default(), &mut |_| ())
            .unwrap()
            .vocab_size(),
        6,
        "the vocabulary of the checkpoint"
    );
}

#[test]
fn files_that_nobody_has_changed_are_not_read_again() {
    let bench = Bench::new(&TEXT.repeat(20));
    let (first, _) = bench.load(TokenizerKind::Gpt2);
    let is_settled = || Identity::of([&bench.path()]).unwrap().is_settled();
    // A change within the resolution of the file system's times would not show, so nothing is concluded from them yet.
    let noted = !bench.files("source").is_empty();
    assert!(is_settled() || !noted);
    while !is_settled() {
        std::thread::sleep(Duration::from_millis(50));
    }
    // On a machine so slow that it was settled by then, the first has left a note, and nothing would be read.
    bench.files("source").iter().for_each(|note| fs::remove_file(note).unwrap());
    let (_, stages) = bench.load(TokenizerKind::Gpt2);
    assert!(stages.contains(&Stage::Reading) && !stages.contains(&Stage::Encoding), "{stages:?}");
    assert_eq!(bench.files("source").len(), 1);
    let (last, stages) = bench.load(TokenizerKind::Gpt2);
    assert!(stages.is_empty(), "{stages:?}");
    assert_eq!(all(&last), all(&first));

    // A damaged note counts for nothing.
    let note = bench.files("source").remove(0);
    let good = fs::read(&note).unwrap();
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1;
        fs::write(&note, bad).unwrap();
        let name = note.file_stem().unwrap().to_str().unwrap();
        let key: Vec<u8> = (0..32).map(|at| u8::from_str_radix(&name[2 * at..2 * at + 2], 16).unwrap()).collect();
        assert_eq!(bench.cache().source(Key(key.try_into().unwrap())), None, "byte {at}");
    }
    // Nor does one that leads to nothing.
    fs::write(&note, &good).unwrap();
    fs::remove_file(&bench.files("ids")[0]).unwrap();
    let (again, stages) = bench.load(TokenizerKind::Gpt2);
    assert!(stages.contains(&Stage::Kept), "{stages:?}");
    assert_eq!(all(&again), all(&first));
}

#[test]
fn shards_are_hashed_once() {
    let bench = Bench::new("");
    let path = bench.folder.path().join("train.bin");
    let ids: Vec<u8> = (0..5_000_u16).flat_map(u16::to_le_bytes).collect();
    fs::write(&path, &ids).unwrap();
    while !Identity::of([&path]).unwrap().is_settled() {
        std::thread::sleep(Duration::from_millis(50));
    }
    let load = || {
        let mut stages = Vec::new();
        let source = CorpusSource::Path(path.clone());
        let corpus = Corpus::load_as(&source, TokenizerKind::Gpt2, &bench.options, &mut |now| stages.push(now.stage));
        (corpus.unwrap(), stages)
    };
    let (first, stages) = load();
    assert!(stages.contains(&Stage::Checking), "{stages:?}");
    let (second, stages) = load();
    assert!(stages.is_empty(), "{stages:?}");
    assert_eq!(all(&first), all(&second));
    // Other ids in the same place, of the same number.
    let other: Vec<u8> = (1..5_001_u16).flat_map(u16::to_le_bytes).collect();
    fs::write(&path, &other).unwrap();
    let (changed, stages) = load();
    assert!(stages.contains(&Stage::Checking), "{stages:?}");
    assert_ne!(changed.hash(), first.hash());
}

#[test]
fn what_is_damaged_is_encoded_anew() {
    let bench = Bench::new(&TEXT.repeat(3));
    let (first, _) = bench.load(TokenizerKind::Chars);
    let path = bench.files("ids").remove(0);
    let good = fs::read(&path).unwrap();
    let cuts = (0..good.len()).step_by(7).map(|length| good[..length].to_vec());
    let flips = (0..good.len()).map(|at| {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        bad
    });
    let longer = [good.clone(), vec![0; 2]].concat();
    for bad in cuts.chain(flips).chain([longer, b"{}".to_vec()]) {
        // Anew, since the file is mapped.
        fs::remove_file(&path).unwrap();
        fs::write(&path, &bad).unwrap();
        let (again, stages) = bench.load(TokenizerKind::Chars);
        assert!(stages.contains(&Stage::Kept), "{stages:?}");
        assert_eq!(all(&again), all(&first));
        assert_eq!(fs::read(&path).unwrap(), good, "it is whole again");
    }
}

#[test]
fn without_a_place_to_write_nothing_is_kept_and_all_works() {
    let bench = Bench::new(TEXT);
    let plain = bench.load_as(TokenizerKind::Gpt2, &LoadOptions::default()).0;
    // A file where the folder should be, for every user, root included; a folder that cannot be made; one without permissions.
    let file = bench.folder.path().join("file");
    fs::write(&file, "").unwrap();
    let closed = bench.folder.path().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o555)).unwrap();
    for place in [file.clone(), file.join("below"), PathBuf::from("/proc/isocomm"), closed] {
        let options = LoadOptions { cache: Some(TokenCache::new(place.clone()).from_bytes(1)), ..Default::default() };
        for _ in 0..2 {
            let (corpus, stages) = bench.load_as(TokenizerKind::Gpt2, &options);
            assert_eq!(all(&corpus), all(&plain), "{}", place.display());
            let told = stages.iter().any(|stage| matches!(stage, Stage::NotKept(_)));
            // Root may write anywhere, and has the ids from there the second time.
            let expected = stages.contains(&Stage::Encoding) && !stages.contains(&Stage::Kept);
            assert_eq!(told, expected, "{}: {stages:?}", place.display());
        }
    }
    // Something that is no file where the ids should be.
    bench.load(TokenizerKind::Gpt2);
    let ids = bench.files("ids").remove(0);
    fs::remove_file(&ids).unwrap();
    fs::create_dir(&ids).unwrap();
    assert_eq!(all(&bench.load(TokenizerKind::Gpt2).0), all(&plain));
    let left = fs::read_dir(bench.cache().folder()).unwrap().map(|file| file.unwrap().path());
    // There is a note where the machine was slow.
    let left: Vec<_> = left.filter(|path| path.extension().is_none_or(|extension| extension != SOURCE)).collect();
    assert_eq!(left, [ids], "nothing half-written stays");
}

#[test]
fn small_texts_are_not_kept() {
    let bench = Bench::new(TEXT);
    let cache = bench.cache().clone().from_bytes(TEXT.len() as u64 + 1);
    let options = LoadOptions { cache: Some(cache), ..Default::default() };
    let (_, stages) = bench.load_as(TokenizerKind::Gpt2, &options);
    assert!(!stages.contains(&Stage::Kept));
    assert!(!bench.cache().folder().exists());
}

#[test]
fn what_others_may_have_planted_counts_for_nothing() {
    let bench = Bench::new(TEXT);
    let (first, _) = bench.load(TokenizerKind::Gpt2);
    let ids = bench.files("ids").remove(0);
    let readable = ids.metadata().unwrap().mode();
    let umask = fs::File::create(bench.folder.path().join("plain")).unwrap().metadata().unwrap().mode();
    assert_eq!(readable & 0o777, umask & 0o777, "as any file of this user");
    let give = |path: &Path, user: u32| std::os::unix::fs::chown(path, Some(user), None);
    // A root of its own machine alone can give files away.
    if give(&ids, 12_345).is_err() {
        return;
    }
    let (again, stages) = bench.load(TokenizerKind::Gpt2);
    assert!(stages.contains(&Stage::Encoding) && stages.contains(&Stage::Kept), "{stages:?}");
    assert_eq!(all(&again), all(&first));
    assert_eq!(ids.metadata().unwrap().uid(), sys::user_id(), "it has been replaced");
    // The owner of the folder is trusted, and so is root.
    give(bench.cache().folder(), 12_345).unwrap();
    for owner in [12_345, 0] {
        give(&ids, owner).unwrap();
        let (_, stages) = bench.load(TokenizerKind::Gpt2);
        assert!(!stages.contains(&Stage::Encoding), "{owner}: {stages:?}");
    }
    // A note, too.
    let key = Key::of(&[b"a"]);
    bench.cache().keep_source(key, &[7; 32]).unwrap();
    assert_eq!(bench.cache().source(key), Some([7; 32]));
    give(&bench.cache().path(key, SOURCE), 23_456).unwrap();
    assert_eq!(bench.cache().source(key), None);
}

#[test]
fn what_is_there_and_whole_is_not_replaced() {
    let bench = Bench::new(TEXT);
    bench.load(TokenizerKind::Gpt2);
    let ids = bench.files("ids").remove(0);
    let name = ids.file_stem().unwrap().to_str().unwrap();
    let key: Vec<u8> = (0..32).map(|at| u8::from_str_radix(&name[2 * at..2 * at + 2], 16).unwrap()).collect();
    let key = Key(key.try_into().unwrap());
    let entry = bench.cache().entry(key).unwrap();
    let before = ids.metadata().unwrap().ino();
    bench.cache().keep(key, &entry).unwrap();
    assert_eq!(ids.metadata().unwrap().ino(), before);
    // What is damaged is.
    fs::remove_file(&ids).unwrap();
    fs::write(&ids, "damaged").unwrap();
    bench.cache().keep(key, &entry).unwrap();
    assert!(bench.cache().entry(key).is_some());
}

#[test]
fn notes_that_nobody_uses_go() {
    let folder = tempfile::tempdir().unwrap();
    let cache = TokenCache::new(folder.path().to_owned());
    let keys = [b"a", b"b", b"c"].map(|name| Key::of(&[name]));
    let age = |key: Key, days: u64| {
        let file = File::options().write(true).open(cache.path(key, SOURCE)).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(days * 24 * 3600)).unwrap();
    };
    for (key, days) in keys.into_iter().zip([91, 89, 91]) {
        cache.keep_source(key, &[1; 32]).unwrap();
        age(key, days);
    }
    // Use keeps them.
    assert!(cache.source(keys[2]).is_some());
    cache.keep_source(Key::of(&[b"d"]), &[1; 32]).unwrap();
    assert_eq!(keys.map(|key| cache.path(key, SOURCE).exists()), [false, true, true]);
}

#[test]
fn of_many_who_come_at_once_one_encodes() {
    let bench = Bench::new(&TEXT.repeat(2_000));
    let (encoded, together) = (AtomicUsize::new(0), Barrier::new(6));
    let hashes: Vec<[u8; 32]> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..6)
            .map(|_| {
                scope.spawn(|| {
                    together.wait();
                    let (corpus, stages) = bench.load(TokenizerKind::Gpt2);
                    encoded.fetch_add(usize::from(stages.contains(&Stage::Encoding)), Ordering::Relaxed);
                    corpus.hash()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(hashes.iter().all(|hash| *hash == hashes[0]));
    assert_eq!(encoded.into_inner(), 1);
    assert!(bench.files("lock").is_empty());
}

#[test]
fn who_waits_goes_on_when_the_other_stops_getting_on() {
    let folder = tempfile::tempdir().unwrap();
    let cache = TokenCache::new(folder.path().to_owned());
    let key = Key::of(&[b"a"]);
    let mut held = cache.lock(key, &mut || panic!("nobody has it"));
    assert!(held.held.is_some());
    // As long as the other shows that it lives, it is waited for.
    let (mut waits, patience) = (0, Duration::from_millis(500));
    let since = Instant::now();
    let lock = cache.lock_within(key, patience, &mut || {
        waits += 1;
        if waits <= 50 {
            held.beat();
        }
    });
    assert!(lock.held.is_none() && waits > 50, "{waits}");
    assert!(since.elapsed() > patience);
    // Another key is another matter, and the next in turn has it at once.
    assert!(cache.lock(Key::of(&[b"b"]), &mut || panic!("nobody has it")).held.is_some());
    drop(held);
    assert!(cache.lock(key, &mut || panic!("nobody has it")).held.is_some());
}

#[test]
fn what_was_used_least_recently_goes_when_there_is_too_much() {
    let bench = Bench::new(TEXT);
    let sizes = |bench: &Bench| -> u64 { bench.files("ids").iter().map(|path| path.metadata().unwrap().len()).sum() };
    let day = |days: u64| SystemTime::now() - Duration::from_secs(days * 24 * 3600);
    let touch = |path: &Path, time| File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
    let mut written = Vec::new();
    for number in 0..4_u64 {
        bench.write(&format!("{TEXT} {number}"));
        bench.load(TokenizerKind::Gpt2);
        let new = bench.files("ids").into_iter().find(|path| !written.contains(path)).unwrap();
        touch(&new, day(10 - number));
        written.push(new);
    }
    // The first is used again.
    bench.write(&format!("{TEXT} 0"));
    bench.load(TokenizerKind::Gpt2);
    for (name, time) in
        [(".writing-old", day(2)), (".writing-new", day(0)), ("old.lock", day(2)), ("other.txt", day(9))]
    {
        let path = bench.cache().folder().join(name);
        fs::write(&path, "x").unwrap();
        touch(&path, time);
    }
    let room = sizes(&bench) * 3 / 4;
    let options = LoadOptions { cache: Some(bench.cache().clone().up_to_bytes(room)), ..bench.options.clone() };
    bench.write(&format!("{TEXT} 9"));
    bench.load_as(TokenizerKind::Gpt2, &options);
    assert!(sizes(&bench) <= room);
    let here: Vec<bool> = written.iter().map(|path| path.exists()).collect();
    assert_eq!(here, [true, false, false, true]);
    let other = |name: &str| bench.cache().folder().join(name).exists();
    assert!(!other(".writing-old") && other(".writing-new") && !other("old.lock") && other("other.txt"));
    // The newest stays, however large.
    let options = LoadOptions { cache: Some(bench.cache().clone().up_to_bytes(1)), ..bench.options.clone() };
    bench.write(&format!("{TEXT} 10"));
    bench.load_as(TokenizerKind::Gpt2, &options);
    assert_eq!(bench.files("ids").len(), 1);
    let (_, stages) = bench.load(TokenizerKind::Gpt2);
    assert!(!stages.contains(&Stage::Encoding));
}
