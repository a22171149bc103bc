use std::fs;

use comm_core::splitmix::SplitMix64;

use super::*;
use crate::corpus::{Corpus, CorpusSource, LoadOptions};
use crate::tokenizer::TokenizerKind;

fn options() -> PrepareOptions {
    PrepareOptions {
        field: "text".into(),
        documents: true,
        shard_tokens: 1_000_000,
        held_out: HeldOut::Share(0.1),
        overwrite: false,
    }
}

fn load(path: &Path, documents: bool) -> Corpus {
    let options = LoadOptions { documents, ..LoadOptions::default() };
    Corpus::load_as(&CorpusSource::Path(path.to_owned()), TokenizerKind::Gpt2, &options, &mut |_| ()).unwrap()
}

/// Text of `pieces` words, white space, marks, parts of marks and characters of several bytes.
fn text(seed: u64, pieces: usize) -> String {
    const PIECES: [&str; 16] = [
        " ",
        " ",
        "\n",
        "\n\n  ",
        "word",
        "words",
        " the",
        "'ll",
        "12",
        "漢字",
        "\u{1f980}",
        "é",
        "<|endoftext|>",
        "<|endof",
        "text|>",
        "<",
    ];
    let mut random = SplitMix64::new(seed);
    (0..pieces).map(|_| PIECES[random.below(PIECES.len() as u64) as usize]).collect()
}

/// Whether shards of `inputs` are the corpus that loading `whole` gives.
fn assert_equal(inputs: &[PathBuf], whole: &Path, options: &PrepareOptions, shape: (usize, usize)) {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("tokens");
    let expected = load(whole, options.documents);
    let prepared = prepare_by(inputs, &out, options, shape, &mut |_| ()).unwrap();
    let shards = load(&out, true);
    assert_eq!(
        (prepared.train_tokens, prepared.validation_tokens),
        (expected.train().len() as u64, expected.validation().len() as u64)
    );
    // Of all ids and the place where the parts meet.
    assert_eq!(shards.hash_hex(), expected.hash_hex(), "{inputs:?} {options:?} {shape:?}");
    assert_eq!((prepared.bytes, prepared.documents), (expected.bytes(), expected.documents().unwrap_or(0)));
    let mut names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["tokens"], "nothing else is left");
}

#[test]
fn shards_of_texts_are_what_training_makes_of_them() {
    for seed in 0..10 {
        let folder = tempfile::tempdir().unwrap();
        let files = 1 + seed as usize % 4;
        for index in 0..files {
            // Some are empty, some white space alone.
            let contents = match (seed + index as u64) % 7 {
                5 => String::new(),
                6 => "\n \n".into(),
                _ => text(100 * seed + index as u64, 80),
            };
            fs::write(
                folder.path().join(format!("{index}.txt")),
                contents + if index == 0 { "some words." } else { "" },
            )
            .unwrap();
        }
        for documents in [true, false] {
            for (shard_tokens, shape) in [(1_000, (1, 1)), (40, (3, 16))] {
                let options = PrepareOptions { documents, shard_tokens, ..options() };
                assert_equal(&[folder.path().into()], folder.path(), &options, shape);
            }
        }
    }
}

#[test]
fn blocks_of_a_file_join() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large.txt");
    // Characters and marks across the ends of blocks, which are 1 MiB.
    let mut large = " word".repeat((1 << 20) / 5) + "<|endoftext|>";
    large += &"漢字 ".repeat((1 << 20) / 7);
    large += &text(1, 30_000);
    fs::write(&path, large).unwrap();
    assert_equal(std::slice::from_ref(&path), &path, &options(), (2, CHUNK));
}

#[test]
fn json_lines_are_the_documents_of_as_many_files() {
    let folder = tempfile::tempdir().unwrap();
    let (lines, files) = (folder.path().join("all.jsonl"), folder.path().join("files"));
    fs::create_dir(&files).unwrap();
    let mut all = String::from("\u{feff}");
    for index in 0..50_u64 {
        let document = text(index, 20).replace("<|endoftext|>", "end");
        fs::write(files.join(format!("{index:02}.txt")), &document).unwrap();
        let object =
            serde_json::json!({"id": index, "meta": {"text": "not this"}, "body": document, "more": [1, null]});
        all += &format!("{object}{}", if index % 9 == 0 { "\r\n\n" } else { "\n" });
    }
    fs::write(&lines, all).unwrap();
    let options = PrepareOptions { field: "body".into(), ..options() };
    assert_equal(&[lines], &files, &options, (2, 64));
}

#[test]
fn a_mark_in_a_json_string_is_text() {
    let folder = tempfile::tempdir().unwrap();
    let (path, out) = (folder.path().join("a.jsonl"), folder.path().join("out"));
    fs::write(&path, "{\"text\": \"a <|endoftext|>\"}\n{\"text\": \"b\"}\n").unwrap();
    let options = PrepareOptions { held_out: HeldOut::NOTHING, ..options() };
    prepare(&[path], &out, &options, &mut |_| ()).unwrap();
    let whole = LoadOptions { held_out: false, ..LoadOptions::default() };
    let corpus = Corpus::load_as(&CorpusSource::Path(out), TokenizerKind::Gpt2, &whole, &mut |_| ()).unwrap();
    let mut ids = Vec::new();
    corpus.train().read(0, corpus.train().len(), &mut ids).unwrap();
    let gpt2 = Tokenizer::gpt2();
    let expected = [gpt2.encode("a <|endoftext|>").unwrap(), vec![50_256], gpt2.encode("b").unwrap()].concat();
    assert_eq!(ids, expected.into_iter().map(i32::from).collect::<Vec<_>>());
}

#[test]
fn the_held_out_part_is_a_share_or_the_last_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let (path, out) = (folder.path().join("a.txt"), folder.path().join("out"));
    fs::write(&path, " word".repeat(1_000)).unwrap();
    let counts = |held_out: &str, shard_tokens| {
        let options =
            PrepareOptions { held_out: held_out.parse().unwrap(), shard_tokens, overwrite: true, ..options() };
        let prepared = prepare(std::slice::from_ref(&path), &out, &options, &mut |_| ()).unwrap();
        (prepared.train_tokens, prepared.validation_tokens, prepared.shards, fs::read_dir(&out).unwrap().count())
    };
    assert_eq!(counts("0.25", 100), (750, 250, 11, 11));
    assert_eq!(counts("30", 1_000), (970, 30, 2, 2));
    assert_eq!(counts("0", 400), (1_000, 0, 3, 3));
    assert_eq!(counts("0.0", 1_000), (1_000, 0, 1, 1));
    for wrong in ["1.0", "-1", "-0.1", "NaN", "inf", "half", "5000000000"] {
        assert!(wrong.parse::<HeldOut>().is_err(), "{wrong}");
    }
    for tenth in (0..10_000).chain((0..2_000).map(|index| index * 1_000_003 + (1 << 40))) {
        let nine = crate::corpus::load::nine_tenths(tenth) as u64;
        assert_eq!(HeldOut::Share(0.1).begins_at(tenth as u64), Some(nine), "{tenth}");
    }
}

/// What is said where `write` has put something to read at the path, which is left alone.
fn said(name: &str, contents: &[u8]) -> String {
    said_with(&options(), name, contents)
}

fn said_with(options: &PrepareOptions, name: &str, contents: &[u8]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    fs::write(&path, contents).unwrap();
    let error = prepare(&[path], &folder.path().join("out"), options, &mut |_| ()).unwrap_err().to_string();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "something is left: {error}");
    error
}

#[test]
fn what_is_wrong_with_an_input_is_said_with_its_line() {
    let good = "{\"text\": \"good\"}\n";
    for (line, expected) in [
        ("{\"text\": 3}", "line 2: invalid type: integer `3`, expected a string, at column"),
        ("{\"text\": null}", "line 2: invalid type: null"),
        ("{\"body\": \"a\"}", "line 2: no field 'text'; name the field of the text with --field"),
        ("{\"text\": \"a\"", "line 2: EOF"),
        ("{\"text\": \"a\"} {}", "line 2: trailing characters"),
        ("{\"text\": \"\\ud800\"}", "hex escape, at column"),
        ("[1]", "line 2: it is a JSON array"),
        ("text", "line 2: not a JSON object"),
    ] {
        let said = said("a.jsonl", format!("{good}{line}\n{good}").as_bytes());
        assert!(said.contains("a.jsonl") && said.contains(expected), "{line}: {said}");
    }
    let invalid = [good.as_bytes(), b"{\"text\": \"\xff\"}\n"].concat();
    assert!(said("a.jsonl", &invalid).contains("line 2: "), "{}", said("a.jsonl", &invalid));
    let text = ["one\n".repeat(400_000).as_bytes(), b"two \xff\n"].concat();
    let expected = "a.txt, line 400001: the text is not UTF-8";
    assert!(said("a.txt", &text).contains(expected), "{}", said("a.txt", &text));
    let cut = "é".as_bytes();
    assert!(said("a.txt", &[b"some text\n", &cut[..1]].concat()).contains("line 2"));
    for (name, contents) in [("a.txt", &b""[..]), ("a.jsonl", b"\n\n"), ("a.jsonl", b"{\"text\": \"\"}")] {
        let said = said(name, contents);
        assert!(said.contains("there is no text in ") && said.contains(name), "{said}");
    }
    let many: Vec<PathBuf> = (0..7).map(|number| format!("{number}.txt").into()).collect();
    assert_eq!(super::listed(&many), "0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 2 others");
    #[cfg(not(feature = "parquet"))]
    assert!(said("a.parquet", b"PAR1").contains("a.parquet is a Parquet file, which this build cannot read"));
    assert!(said("a.bin", b"text").contains("already a token shard"));
    assert!(said("a.jsonl", b"\x1f\x8b\x08\0\0\0\0\0\0\x03..........").contains("looks like a gzip file"));
    // Where a part begins the text is cut in any case.
    let whole = PrepareOptions { held_out: HeldOut::NOTHING, ..options() };
    let uncut = said_with(&whole, "a.txt", "x".repeat(LONGEST + BLOCK).as_bytes());
    assert!(uncut.contains("line 1: more than 64 MiB without a space"), "{uncut}");
}

/// Bytes of a block of a file.
const BLOCK: usize = 1 << 20;

#[test]
fn a_folder_appears_whole_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let (path, out) = (folder.path().join("a.txt"), folder.path().join("out"));
    fs::write(&path, " word".repeat(1_000)).unwrap();
    let run =
        |overwrite| prepare(std::slice::from_ref(&path), &out, &PrepareOptions { overwrite, ..options() }, &mut |_| ());
    // What one that was killed has left is in nobody's way.
    let partial = folder.path().join(".out.partial");
    fs::create_dir(&partial).unwrap();
    fs::write(partial.join("train_000007.bin"), "half").unwrap();
    // One that is empty is as none.
    fs::create_dir(&out).unwrap();
    run(false).unwrap();
    let names = || {
        let mut names: Vec<_> = fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(), ["train_000000.bin", "val_000000.bin"]);
    assert!(run(false).unwrap_err().to_string().contains("--overwrite"));
    run(true).unwrap();
    fs::write(out.join("notes.txt"), "mine").unwrap();
    let error = run(true).unwrap_err().to_string();
    assert!(error.contains("notes.txt"), "{error}");
    fs::remove_file(out.join("notes.txt")).unwrap();
    // Another that writes there.
    let other = Output::begin(&out, true, &mut || ()).unwrap();
    assert!(matches!(run(true).unwrap_err(), PrepareError::Busy { .. }));
    drop(other);
    run(true).unwrap();
    assert!(!partial.exists());
    // One that was killed after it had moved the old shards away.
    for overwrite in [false, true] {
        fs::rename(&out, folder.path().join(".out.replaced")).unwrap();
        let mut restored = 0;
        let mut watch = |now: LoadStatus| restored += i32::from(now.stage == Stage::Restored);
        let options = PrepareOptions { overwrite, ..options() };
        let result = prepare(std::slice::from_ref(&path), &out, &options, &mut watch);
        assert_eq!(result.err().map(|error| error.to_string().contains("--overwrite")), (!overwrite).then_some(true));
        assert_eq!((restored, names().len()), (1, 2));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "the text and the shards");
    }
}

#[test]
fn a_link_stands_for_its_folder_and_a_mounted_one_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (path, real, link) = (folder.path().join("a.txt"), folder.path().join("real"), folder.path().join("link"));
    fs::write(&path, " word".repeat(100)).unwrap();
    let run = |out: &Path, overwrite| {
        prepare(std::slice::from_ref(&path), out, &PrepareOptions { overwrite, ..options() }, &mut |_| ())
    };
    let lost = folder.path().join("lost");
    std::os::unix::fs::symlink("none/at/all", &lost).unwrap();
    let error = run(&lost, false).unwrap_err().to_string();
    assert!(error.contains("does not exist"), "{error}");
    std::os::unix::fs::symlink("real", &link).unwrap();
    // Without a folder, with an empty one, and with one that has shards.
    for overwrite in [None, Some(false), Some(true)] {
        if overwrite == Some(false) {
            fs::remove_dir_all(&real).unwrap();
            fs::create_dir(&real).unwrap();
        }
        run(&link, overwrite == Some(true)).unwrap();
        assert!(link.is_symlink() && !real.is_symlink(), "the folder is replaced, not the link");
        assert_eq!(fs::read_dir(&real).unwrap().count(), 2);
    }
    // Every Linux has it mounted.
    let error = run(Path::new("/proc"), true).unwrap_err().to_string();
    assert!(error.contains("/proc: it is a mount point") && error.contains("inside it"), "{error}");
}
