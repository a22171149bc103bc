use std::{fs, path::Path};

use sha2::{Digest as _, Sha256};

use super::load::nine_tenths;
use super::*;

/// The file that the figures below are known for, where this checkout has it.
fn tinyshakespeare() -> Option<CorpusSource> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/tinyshakespeare.txt");
    if path.is_file() {
        return Some(CorpusSource::Path(path));
    }
    eprintln!("skipped: there is no {}", path.display());
    None
}

fn folder_with(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, contents) in files {
        fs::write(folder.path().join(name), contents).unwrap();
    }
    folder
}

fn load(path: &Path, kind: TokenizerKind) -> Result<Corpus, CorpusError> {
    Corpus::load(&CorpusSource::Path(path.to_owned()), kind)
}

fn ids(stream: &TokenStream) -> Vec<i32> {
    let mut out = Vec::new();
    stream.read(0, stream.len(), &mut out).unwrap();
    out
}

fn raw(ids: &[u16]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

#[test]
fn tinyshakespeare_has_the_counts_that_nanogpt_prints() {
    let Some(source) = tinyshakespeare() else {
        return;
    };
    let gpt2 = Corpus::load(&source, TokenizerKind::Gpt2).unwrap();
    assert_eq!((gpt2.train().len(), gpt2.validation().len()), (301_966, 36_059));
    assert_eq!(gpt2.train().len() + gpt2.validation().len(), 338_025);
    assert_eq!(gpt2.bytes(), 1_115_394);

    let chars = Corpus::load(&source, TokenizerKind::Chars).unwrap();
    assert_eq!(chars.vocab_size(), 65);
    assert_eq!((chars.train().len(), chars.validation().len()), (1_003_854, 111_540));
    // nanoGPT numbers the sorted characters from line end, blank and `!`: "First" is 18, 47, 56, 57, 58.
    assert_eq!(ids(chars.train())[..5], [18, 47, 56, 57, 58]);
}

#[test]
fn one_text_file_is_split_between_characters() {
    let folder = folder_with(&[("t.txt", "äöüäöüäöüß".as_bytes())]);
    let path = folder.path().join("t.txt");
    let chars = load(&path, TokenizerKind::Chars).unwrap();
    assert_eq!((chars.train().len(), chars.validation().len()), (9, 1));
    assert_eq!(ids(chars.validation()), [0]);
    assert_eq!(chars.tokenizer().decode(&[0]).unwrap(), "ß");
    let gpt2 = load(&path, TokenizerKind::Gpt2).unwrap();
    let held_out: Vec<u16> = ids(gpt2.validation()).iter().map(|&id| id as u16).collect();
    assert_eq!(gpt2.tokenizer().decode(&held_out).unwrap(), "ß");
    let bytes = load(&path, TokenizerKind::Bytes).unwrap();
    assert_eq!((bytes.train().len(), bytes.validation().len()), (18, 2));
}

#[test]
fn a_folder_of_text_is_one_text_in_order_of_path() {
    let folder = folder_with(&[("b.txt", b"world\n"), ("a.md", b"hello"), ("c.rs", b"no")]);
    let corpus = load(folder.path(), TokenizerKind::Bytes).unwrap();
    let all: Vec<u8> = [corpus.train(), corpus.validation()].into_iter().flat_map(ids).map(|id| id as u8).collect();
    assert_eq!(all, b"hello\nworld\n");
    assert_eq!(*corpus.origin(), Origin::Text { path: folder.path().to_owned(), files: 2 });
    let described = corpus.describe();
    assert!(
        described.starts_with("text of 2 files in ") && described.contains("12 bytes, 12 bytes tokens"),
        "{described}"
    );
    assert!(described.ends_with(&corpus.hash_hex()), "{described}");
}

#[test]
fn shards_are_split_by_name_or_by_count() {
    let all: Vec<u16> = (0..100).collect();
    let folder = folder_with(&[("a.bin", &raw(&all[..60])), ("b.bin", &raw(&all[60..])), ("note.txt", b"text")]);
    let whole = load(folder.path(), TokenizerKind::Gpt2).unwrap();
    assert_eq!(ids(whole.train()), (0..90).collect::<Vec<_>>());
    assert_eq!(ids(whole.validation()), (90..100).collect::<Vec<_>>());
    assert_eq!((whole.vocab_size(), whole.bytes()), (50_257, 200));

    let folder =
        folder_with(&[("train_2.bin", &raw(&[3, 4])), ("train_1.bin", &raw(&[1, 2])), ("val.bin", &raw(&[9]))]);
    let parts = load(folder.path(), TokenizerKind::Gpt2).unwrap();
    assert_eq!((ids(parts.train()), ids(parts.validation())), (vec![1, 2, 3, 4], vec![9]));
    assert_eq!(*parts.origin(), Origin::Shards { path: folder.path().to_owned(), files: 3 });

    let one = load(&folder.path().join("train_1.bin"), TokenizerKind::Gpt2).unwrap();
    assert_eq!((ids(one.train()), ids(one.validation())), (vec![1], vec![2]));
}

#[test]
fn the_same_tokens_hash_the_same_from_text_and_from_shards() {
    let text = "The quick brown fox jumps over the lazy dog. ".repeat(50);
    let folder = folder_with(&[("t.txt", text.as_bytes())]);
    let from_text = load(&folder.path().join("t.txt"), TokenizerKind::Gpt2).unwrap();
    let part = |stream| raw(&ids(stream).iter().map(|&id| id as u16).collect::<Vec<_>>());
    let shards = folder_with(&[("train.bin", &part(from_text.train())), ("val.bin", &part(from_text.validation()))]);
    let from_shards = load(shards.path(), TokenizerKind::Gpt2).unwrap();
    assert_eq!(from_text.hash(), from_shards.hash());
    assert_eq!(from_text.hash(), load(&folder.path().join("t.txt"), TokenizerKind::Gpt2).unwrap().hash());
}

#[test]
fn the_hash_tells_tokens_split_and_tokenizer_apart() {
    let shards = |train: &[u16], validation: &[u16]| {
        let folder = folder_with(&[("train.bin", &raw(train)), ("val.bin", &raw(validation))]);
        load(folder.path(), TokenizerKind::Gpt2).unwrap().hash()
    };
    let folder = folder_with(&[("t.txt", b"0123456789")]);
    let text = |kind| load(&folder.path().join("t.txt"), kind).unwrap().hash();
    let all = [
        shards(&[1, 2, 3], &[4]),
        shards(&[1, 2], &[3, 4]),
        shards(&[1, 2, 5], &[4]),
        text(TokenizerKind::Gpt2),
        text(TokenizerKind::Bytes),
        text(TokenizerKind::Chars),
    ];
    for (index, hash) in all.iter().enumerate() {
        assert!(!all[..index].contains(hash), "hash {index} occurs twice");
    }
}

#[test]
fn the_hash_is_the_documented_one() {
    let folder = folder_with(&[("t.txt", b"0123456789")]);
    let corpus = load(&folder.path().join("t.txt"), TokenizerKind::Bytes).unwrap();
    let mut message = b"token corpus 1\0bytes".to_vec();
    for number in [256_u64, 9, 1] {
        message.extend(number.to_le_bytes());
    }
    message.extend(b"0123456789".iter().flat_map(|&byte| u16::from(byte).to_le_bytes()));
    assert_eq!(corpus.hash()[..], Sha256::digest(&message)[..]);
}

#[test]
fn without_a_path_the_documentation_of_the_dependencies_is_the_text() {
    let home = crate::env::default_cargo_home();
    let source = CorpusSource::from_path(None, home);
    let corpus = Corpus::load(&source, TokenizerKind::Gpt2).unwrap();
    if let Origin::Synthetic { instead, .. } = corpus.origin() {
        eprintln!("skipped: the dependencies were not built from Cargo's registry: {instead:?}");
        return;
    }
    assert!(
        matches!(corpus.origin(), Origin::Documentation { crates, files } if *files >= *crates),
        "{:?}",
        corpus.origin()
    );
    assert!((500_000..2_000_000).contains(&corpus.bytes()), "{}", corpus.describe());
    assert_eq!(corpus.entropy_rate(), None);
    eprintln!("{}", corpus.describe());
}

#[test]
fn without_the_documentation_synthetic_text_stands_in_and_says_so() {
    let home = tempfile::tempdir().unwrap();
    let source = CorpusSource::from_path(None, Some(home.path().to_owned()));
    let corpus = Corpus::load(&source, TokenizerKind::Bytes).unwrap();
    assert_eq!(corpus.bytes(), 1 << 20);
    let rate = corpus.entropy_rate().unwrap();
    let described = corpus.describe();
    assert!(described.contains(&format!("entropy rate {rate:.4} nats per token")), "{described}");
    assert!(described.contains("no documentation was found"), "{described}");

    let asked = CorpusSource::Synthetic { seed: FALLBACK_SEED, bytes: FALLBACK_BYTES };
    let asked = Corpus::load(&asked, TokenizerKind::Bytes).unwrap();
    assert_eq!(asked.hash(), corpus.hash());
    assert!(!asked.describe().contains("documentation"));
    let chars = Corpus::load(&CorpusSource::Synthetic { seed: 2, bytes: 5_000 }, TokenizerKind::Chars).unwrap();
    assert_eq!((chars.vocab_size(), chars.entropy_rate()), (20, None));
}

#[test]
fn a_checkpoints_tokenizer_keeps_its_numbering() {
    let folder = folder_with(&[("old.txt", b"abcdefghij"), ("new.txt", b"jjjjjaaaaa"), ("other.txt", b"xyz")]);
    let old = load(&folder.path().join("old.txt"), TokenizerKind::Chars).unwrap();
    let with = |name| {
        Corpus::load_with(
            &CorpusSource::Path(folder.path().join(name)),
            old.tokenizer(),
            &LoadOptions::default(),
            &mut |_| (),
        )
    };
    assert_eq!(ids(with("new.txt").unwrap().train()), [9, 9, 9, 9, 9, 0, 0, 0, 0]);
    let error = with("other.txt").unwrap_err();
    assert!(matches!(
        error,
        CorpusError::Encode { source: TokenizerError::UnknownCharacter { character: 'x', .. }, .. }
    ));
    assert!(error.to_string().contains("other.txt"), "{error}");
}

#[test]
fn every_error_names_the_path_and_what_to_try() {
    let folder = folder_with(&[
        ("empty.txt", b""),
        ("latin1.txt", b"caf\xe9 au lait"),
        ("a.bin", &raw(&[1, 2, 3])),
        ("bad.bin", &raw(&[1, 60_000, 3])),
        ("magic.bin", &20_240_801_u32.to_le_bytes()),
    ]);
    let fails = |name: &str, kind, hint: &str| {
        let error = load(&folder.path().join(name), kind).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(name) && text.contains(hint), "{text}");
        error
    };
    let error = fails("none.txt", TokenizerKind::Gpt2, "give a text file");
    assert!(matches!(error, CorpusError::Missing { .. }));
    let error = fails("empty.txt", TokenizerKind::Gpt2, "give a file");
    assert!(matches!(error, CorpusError::Empty { .. }));
    let error = fails("latin1.txt", TokenizerKind::Gpt2, "tokenizer `bytes`");
    assert!(matches!(error, CorpusError::Encode { source: TokenizerError::NotUtf8 { offset: 3, .. }, .. }));
    assert!(load(&folder.path().join("latin1.txt"), TokenizerKind::Bytes).is_ok());
    let error = fails("a.bin", TokenizerKind::Chars, "tokenizer `gpt2`");
    assert!(matches!(error, CorpusError::ShardTokenizer { .. }));
    let error = fails("bad.bin", TokenizerKind::Gpt2, "write it again");
    assert!(matches!(error, CorpusError::OutOfVocabulary { position: 1, id: 60_000, .. }));
    let error = fails("magic.bin", TokenizerKind::Gpt2, "write it again");
    assert!(matches!(error, CorpusError::BadMagic { .. }));

    let nothing = folder_with(&[("a.rs", b"fn")]);
    assert!(matches!(load(nothing.path(), TokenizerKind::Gpt2), Err(CorpusError::NothingInFolder { .. })));
    let empties = folder_with(&[("a.txt", b""), ("b.txt", b"")]);
    assert!(matches!(load(empties.path(), TokenizerKind::Gpt2), Err(CorpusError::Empty { .. })));
    let foreign = folder_with(&[("train.bin", &raw(&[1])), ("val.bin", &raw(&[1])), ("meta.pkl", b"x")]);
    assert!(matches!(load(foreign.path(), TokenizerKind::Gpt2), Err(CorpusError::OtherVocabulary { .. })));
    let synthetic = CorpusSource::Synthetic { seed: 1, bytes: 0 };
    assert!(matches!(Corpus::load(&synthetic, TokenizerKind::Bytes), Err(CorpusError::EmptySynthetic)));
}

/// 60,000 ids as some other program may have written them.
fn many_ids() -> impl Iterator<Item = u32> {
    (0..60_000_u32).map(|index| index.wrapping_mul(2_654_435_761) % 50_257)
}

#[test]
fn a_file_of_another_format_is_refused_with_what_it_looks_like() {
    let wide: Vec<u8> = many_ids().flat_map(u32::to_le_bytes).collect();
    let right: Vec<u8> = many_ids().flat_map(|id| (id as u16).to_le_bytes()).collect();
    let mut npy = b"\x93NUMPY\x01\0v\0{'descr': '<u2', 'fortran_order': False, 'shape': (60000,), }".to_vec();
    npy.resize(127, b' ');
    npy.push(b'\n');
    npy.extend(&right);
    let gzip = b"\x1f\x8b\x08\0\0\0\0\0\0\x03".repeat(20);
    let mut safetensors = 64_u64.to_le_bytes().to_vec();
    safetensors.extend(format!("{:<64}", r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#).into_bytes());
    safetensors.extend([0; 4]);
    let utf16: Vec<u8> = "\u{feff}Some text, as Windows writes it.".encode_utf16().flat_map(u16::to_le_bytes).collect();
    let text = b"It was a bright cold day in April, and the clocks were striking thirteen.\n";
    let folder = folder_with(&[
        ("wide.bin", &wide),
        ("npy.bin", &npy),
        ("gzip.bin", &gzip),
        ("plain.bin", text),
        ("gzip.txt", &gzip),
        ("model.safetensors", &safetensors),
        ("utf16.txt", &utf16),
        ("right.bin", &right),
        ("right.txt", text),
    ]);
    let refused = |name: &str, kind, parts: &[&str]| {
        let error = load(&folder.path().join(name), kind).unwrap_err();
        assert!(matches!(error, CorpusError::OtherFormat { .. }), "{error}");
        let said = error.to_string();
        assert!(parts.iter().chain([&name]).all(|part| said.contains(part)), "{said}");
    };
    refused("wide.bin", TokenizerKind::Gpt2, &["32-bit integers", "'<u2'"]);
    refused("npy.bin", TokenizerKind::Gpt2, &["NumPy array", "'<u2'"]);
    refused("gzip.bin", TokenizerKind::Gpt2, &["gzip", "unpack"]);
    refused("plain.bin", TokenizerKind::Gpt2, &["plain text", ".txt"]);
    for kind in [TokenizerKind::Gpt2, TokenizerKind::Chars] {
        refused("gzip.txt", kind, &["gzip", "unpack"]);
        refused("model.safetensors", kind, &["safetensors", "not like text"]);
        refused("utf16.txt", kind, &["UTF-16", "iconv"]);
    }
    assert_eq!(load(&folder.path().join("right.bin"), TokenizerKind::Gpt2).unwrap().bytes(), 120_000);
    // Bytes are bytes, and it is said what they look like.
    let bytes = load(&folder.path().join("gzip.txt"), TokenizerKind::Bytes).unwrap();
    assert!(
        bytes.describe().contains("gzip.txt (taken as text, although it looks like a gzip file): 200 bytes"),
        "{}",
        bytes.describe()
    );
    assert!(!load(&folder.path().join("right.txt"), TokenizerKind::Bytes).unwrap().describe().contains("looks like"));
    // One among many is named.
    let error = load(folder.path(), TokenizerKind::Gpt2).unwrap_err().to_string();
    assert!(error.contains("gzip.bin looks like a gzip file"), "{error}");
}

#[test]
fn shards_of_another_vocabulary_are_refused_wherever_they_are_named() {
    let ids = raw(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    let folder = folder_with(&[("alone.bin", &ids)]);
    let (chars, gpt2) = (folder.path().join("data/chars"), folder.path().join("data/gpt2"));
    for place in [&chars, &gpt2] {
        fs::create_dir_all(place).unwrap();
        fs::write(place.join("train.bin"), &ids).unwrap();
        fs::write(place.join("val.bin"), &ids).unwrap();
    }
    fs::write(chars.join("meta.pkl"), b"x").unwrap();
    let links = folder.path().join("links");
    fs::create_dir(&links).unwrap();
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(chars.join("train.bin"), links.join("link.bin")).unwrap();
        std::os::unix::fs::symlink(&chars, folder.path().join("linked")).unwrap();
    }
    let refused = [
        chars.clone(),
        chars.join("train.bin"),
        chars.join("val.bin"),
        chars.join("../chars/val.bin"),
        folder.path().join("data"),
        #[cfg(unix)]
        links.clone(),
        #[cfg(unix)]
        links.join("link.bin"),
        #[cfg(unix)]
        folder.path().join("linked/train.bin"),
    ];
    for path in refused {
        let error = load(&path, TokenizerKind::Gpt2).unwrap_err();
        assert!(matches!(error, CorpusError::OtherVocabulary { .. }), "{}: {error}", path.display());
        assert!(error.to_string().contains("tokenizer `chars`"), "{error}");
    }
    for path in [gpt2.clone(), gpt2.join("train.bin"), folder.path().join("alone.bin")] {
        assert!(load(&path, TokenizerKind::Gpt2).is_ok(), "{}", path.display());
    }
}

#[test]
fn the_end_of_a_document_is_one_token_and_is_counted() {
    let folder = folder_with(&[
        ("many.txt", "<|endoftext|>".repeat(5_000).as_bytes()),
        ("two.txt", b"Hello world<|endoftext|>\nHello again, and again, and again.\n<|endoftext|>\n"),
    ]);
    let (many, two) = (folder.path().join("many.txt"), folder.path().join("two.txt"));
    let all = |corpus: &Corpus| [ids(corpus.train()), ids(corpus.validation())].concat();
    let gpt2 = load(&many, TokenizerKind::Gpt2).unwrap();
    assert_eq!(all(&gpt2), [50_256; 5_000]);
    assert_eq!((gpt2.train().len(), gpt2.documents()), (4_500, Some(0)));
    let gpt2 = load(&two, TokenizerKind::Gpt2).unwrap();
    assert_eq!(all(&gpt2)[..5], [15_496, 995, 50_256, 198, 15_496]);
    assert_eq!(all(&gpt2).iter().filter(|id| **id == 50_256).count(), 2);
    assert!(gpt2.describe().contains(" bytes, 2 documents, "), "{}", gpt2.describe());

    let plain = LoadOptions { documents: false, ..LoadOptions::default() };
    let as_text =
        |path: &Path, kind| Corpus::load_as(&CorpusSource::Path(path.to_owned()), kind, &plain, &mut |_| ()).unwrap();
    let text = as_text(&many, TokenizerKind::Gpt2);
    assert_eq!(all(&text).len(), 30_002);
    assert!(!all(&text).contains(&50_256));
    assert!(text.describe().contains("<|endoftext|> as plain text"), "{}", text.describe());
    // The others have no such token, with or without the option.
    for kind in [TokenizerKind::Bytes, TokenizerKind::Chars] {
        let corpus = load(&many, kind).unwrap();
        assert_eq!(all(&corpus).len(), 65_000);
        assert_eq!(corpus.hash(), as_text(&many, kind).hash());
        assert_eq!(corpus.documents(), None);
    }
}

#[test]
fn files_of_a_folder_are_documents_for_gpt2_alone() {
    let folder = folder_with(&[("a.txt", b"Hello"), ("b.txt", b""), ("c.md", b" world\n"), ("d.txt", b"Hello")]);
    let all = |corpus: &Corpus| [ids(corpus.train()), ids(corpus.validation())].concat();
    let gpt2 = load(folder.path(), TokenizerKind::Gpt2).unwrap();
    // Nine tenths of the characters end inside the last `Hello`.
    assert_eq!(all(&gpt2)[..5], [15_496, 50_256, 995, 198, 50_256]);
    assert_eq!(gpt2.documents(), Some(3));
    assert!(gpt2.describe().contains("text of 4 files in ") && gpt2.describe().contains(", 3 documents, "));
    let plain = LoadOptions { documents: false, ..LoadOptions::default() };
    let source = CorpusSource::Path(folder.path().to_owned());
    let text = Corpus::load_as(&source, TokenizerKind::Gpt2, &plain, &mut |_| ()).unwrap();
    assert_eq!(text.bytes(), b"Hello\n world\nHello".len() as u64);
    assert!(!all(&text).contains(&50_256));
    let bytes = load(folder.path(), TokenizerKind::Bytes).unwrap();
    assert_eq!(bytes.bytes(), text.bytes());
}

#[test]
fn the_held_out_part_does_not_begin_inside_the_end_of_a_document() {
    for before in 0..200 {
        let text = "a".repeat(before) + "<|endoftext|>" + &"b".repeat(12);
        let folder = folder_with(&[("t.txt", text.as_bytes())]);
        let corpus = load(&folder.path().join("t.txt"), TokenizerKind::Gpt2).unwrap();
        let ends = [corpus.train(), corpus.validation()].into_iter().flat_map(ids).filter(|id| *id == 50_256).count();
        assert_eq!(ends, 1, "after {before}");
    }
}

#[cfg(unix)]
#[test]
fn a_device_is_not_read_and_an_unreadable_folder_is_an_error() {
    let error = load(Path::new("/dev/zero"), TokenizerKind::Bytes).unwrap_err();
    assert!(matches!(error, CorpusError::NotAFile { .. }), "{error}");
    let folder = folder_with(&[("a.txt", b"text")]);
    let below_a_file = folder.path().join("a.txt/b.txt");
    let error = load(&below_a_file, TokenizerKind::Bytes).unwrap_err();
    assert!(matches!(error, CorpusError::Read { .. }), "{error}");
}

#[test]
fn nine_tenths_is_rounded_down_at_every_length() {
    for len in 0..1_000 {
        assert_eq!(nine_tenths(len), len * 9 / 10);
    }
    assert!(nine_tenths(usize::MAX) < usize::MAX);
}
