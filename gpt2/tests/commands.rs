//! `gpt2 data`, `gpt2 eval`, `gpt2 sample` and settings from a file, as a user meets them.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use burn::tensor::Device;
use gpt2::checkpoint::Checkpoint;
use gpt2::config::ModelConfig;
use gpt2::segments::SegmentedModel;
use serde_json::{Value, json};

use crate::cli::{gpt2, refused};

/// What a command that succeeds prints.
fn said(arguments: &str, folder: &Path) -> String {
    let output = gpt2(&arguments.split(' ').collect::<Vec<_>>(), folder);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{arguments}: {said}{}", String::from_utf8_lossy(&output.stderr));
    said
}

/// A text of which the held-out tenth is four sequences of 32 tokens and one token.
fn write_text(folder: &Path) -> String {
    let text: String = "The quick brown fox jumps over the lazy dog, and runs. ".repeat(24)[..1290].into();
    fs::write(folder.join("text.txt"), &text).unwrap();
    text
}

const TRAIN: &str = "train --preset micro --tokenizer bytes --data text.txt --batch 4 --threads 1 --lr 1e-2 --steps 8";

#[test]
fn a_model_is_evaluated_as_training_does_it() {
    let folder = tempfile::tempdir().unwrap();
    let text = write_text(folder.path());
    let trained = said(TRAIN, folder.path());
    let (_, loss) = trained.rsplit_once("validation loss ").unwrap();
    let loss: f64 = loss[..6].parse().unwrap();
    let figures = |more: &str| -> Value {
        let all: Value =
            serde_json::from_str(&said(&format!("eval out --data text.txt --json{more}"), folder.path())).unwrap();
        all["text"].clone()
    };
    let held_out = figures(" --part validation");
    assert!((held_out["loss"].as_f64().unwrap() - loss).abs() < 6e-5, "{held_out} {loss}");
    assert_eq!(held_out["tokens"], 128);
    let (all, rest) = (figures(" --batch 3"), figures(" --part training"));
    assert_eq!(
        (&all["tokens"], &all["bytes"], &rest["tokens"]),
        (&json!(text.len() - 1), &json!(text.len() - 1), &json!(1160))
    );
    let nats = all["loss"].as_f64().unwrap();
    assert!((all["bits_per_byte"].as_f64().unwrap() - nats / std::f64::consts::LN_2).abs() < 1e-9);
    assert!((all["perplexity"].as_f64().unwrap() - nats.exp()).abs() < 1e-9 * nats.exp());
    let lines = said("eval out/model.safetensors --data text.txt", folder.path());
    assert!(
        lines.contains(&format!("loss {nats:.4} nats per token")) && lines.contains("1289 tokens predicted"),
        "{lines}"
    );
    fs::write(folder.path().join("one.txt"), "a").unwrap();
    for (arguments, expected) in [
        ("eval out --data one.txt", "1 token"),
        ("eval out --data nowhere.txt", "nowhere.txt"),
        ("eval nowhere --data text.txt", "nowhere"),
        ("eval out --data text.txt --batch 0", "--batch 0"),
        ("eval out --data text.txt --tokenizer gpt2", "the tokenizer bytes"),
        ("eval out", "--data"),
        ("eval out --hellaswag text.txt", "llm.c"),
        ("eval out --hellaswag questions.bin", "the tokenizer bytes"),
    ] {
        fs::write(folder.path().join("questions.bin"), questions()).unwrap();
        let said = refused(&arguments.split(' ').collect::<Vec<_>>(), folder.path());
        assert!(said.contains(expected), "{arguments}: {said}");
    }
}

/// Two questions of three choices.
fn questions() -> Vec<u8> {
    let mut header: Vec<u8> = [20_240_522_u32, 1, 2, 32].iter().flat_map(|number| number.to_le_bytes()).collect();
    header.resize(1024, 0);
    let question = |index: u16| [u16::MAX, 28, index, index, 3, 2, 10, 20, 1, 3, 1, 4, 1, 5];
    let words = [0, 1].into_iter().flat_map(question).flat_map(u16::to_le_bytes);
    header.into_iter().chain(words).collect()
}

#[test]
fn a_model_answers_questions() {
    let folder = tempfile::tempdir().unwrap();
    let config = ModelConfig { n_layer: 1, n_head: 1, n_embd: 4, block_size: 8, vocab_size: 50_257 };
    let model = SegmentedModel::new(config, 1, &Device::flex()).unwrap();
    let checkpoint = Checkpoint::of(&model, json!({"kind": "gpt2"}), 1).unwrap();
    checkpoint.save(&folder.path().join("model.safetensors")).unwrap();
    fs::write(folder.path().join("questions.bin"), questions()).unwrap();
    let figures: Value = serde_json::from_str(&said("eval . --hellaswag questions.bin --json", folder.path())).unwrap();
    let found = &figures["choices"];
    assert_eq!((&found["questions"], &found["too_long"]), (&json!(2), &json!(0)));
    // One choice is the answer to both, and right for at most one.
    assert!([0.0, 0.5].contains(&found["acc"].as_f64().unwrap()) && found["acc"] == found["acc_norm"], "{figures}");
    let line = said("eval . --hellaswag questions.bin", folder.path());
    assert!(line.starts_with("2 questions: "), "{line}");
}

#[test]
fn a_sample_takes_its_prompt_from_anywhere_and_ends_where_it_is_told() {
    let folder = tempfile::tempdir().unwrap();
    write_text(folder.path());
    said(TRAIN, folder.path());
    let sample = |more: &str| said(&format!("sample --checkpoint out --tokens 40 {more}"), folder.path());
    let whole = sample("--temperature 0 --prompt The");
    assert_eq!(whole.chars().count(), 3 + 40 + 1, "{whole:?}");
    fs::write(folder.path().join("prompt.txt"), "The").unwrap();
    assert_eq!(sample("--temperature 0 --prompt-file prompt.txt"), whole);
    let mut child = Command::new(env!("CARGO_BIN_EXE_gpt2"))
        .args("sample --checkpoint out --tokens 40 --temperature 0 --prompt-file -".split(' '))
        .current_dir(folder.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"The").unwrap();
    assert_eq!(String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap(), whole);
    // Before the first place where these two characters stand.
    let written = &whole[3..];
    let stop = &written[20..22];
    let (before, _) = written.split_once(stop).unwrap();
    let output = gpt2(
        &[
            "sample",
            "--checkpoint",
            "out",
            "--tokens",
            "40",
            "--temperature",
            "0",
            "--prompt",
            "The",
            "--stop",
            "never",
            "--stop",
            stop,
        ],
        folder.path(),
    );
    assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("The{before}\n"));

    let three = sample("--prompt The --samples 3 --seed 5");
    let texts: Vec<&str> = three.split("---\n").collect();
    assert_eq!(texts.len(), 3);
    assert!(
        texts.iter().all(|text| text.starts_with("The") && text.ends_with('\n')) && texts[0] != texts[1],
        "{texts:?}"
    );
    assert_eq!(sample("--prompt The --seed 5"), texts[0]);
    assert_ne!(sample("--prompt The --seed 6"), texts[0]);
    assert_eq!(sample("--prompt The --top-p 1e-9"), whole, "the likeliest alone");
    for (arguments, expected) in [
        ("sample --checkpoint out --top-p 0", "--top-p 0"),
        ("sample --checkpoint out --top-p 1.5", "--top-p 1.5"),
        ("sample --checkpoint out --samples 0", "--samples"),
        ("sample --checkpoint out --prompt-file nowhere.txt", "nowhere.txt"),
        ("sample --checkpoint out --prompt-file /dev/null", "empty"),
        ("sample --checkpoint out --prompt a --prompt-file prompt.txt", "--prompt"),
        ("sample --checkpoint text.txt", "text.txt"),
    ] {
        let said = refused(&arguments.split(' ').collect::<Vec<_>>(), folder.path());
        assert!(said.contains(expected), "{arguments}: {said}");
    }
}

#[test]
fn settings_come_from_a_file_on_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    write_text(folder.path());
    let file = "strategy = \"ddp\"\ntransport = \"tcp-raw\"\nnproc = 2\npreset = \"micro\"\ntokenizer = \"bytes\"\ndata = \"text.txt\"\n\
                batch = 4\nthreads = 1\nsteps = 50\neval_every = 0\nno-overlap = true\n";
    fs::write(folder.path().join("run.toml"), file).unwrap();
    let hash = |said: &str| said.split_once("weights: sha256 ").unwrap().1[..64].to_owned();
    let from_file = said("train --config run.toml --steps 2 --no-overlap=false --out a", folder.path());
    assert!(from_file.contains("step     2/2 | loss") && from_file.contains("ddp on 2 rank(s)"), "{from_file}");
    let given = "--strategy ddp --transport tcp-raw --nproc 2 --preset micro --tokenizer bytes --data text.txt --batch 4 --threads 1";
    let by_hand = said(&format!("train {given} --steps 2 --eval-every 0 --out b"), folder.path());
    assert_eq!(hash(&from_file), hash(&by_hand));
    fs::write(folder.path().join("wrong.toml"), "learning_rate = 1e-3\n").unwrap();
    let said = refused(&["train", "--config", "wrong.toml"], folder.path());
    assert!(said.contains("wrong.toml") && said.contains("unknown setting 'learning_rate'"), "{said}");
}

#[test]
fn shards_train_as_their_text_does() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("texts")).unwrap();
    for (name, word) in [("a.txt", "fox"), ("b.txt", "bear")] {
        let text = format!("The quick brown {word} jumps over the lazy dog, and runs away. ").repeat(60);
        fs::write(folder.path().join("texts").join(name), text).unwrap();
    }
    let prepared = said("data texts --out tokens --shard-tokens 300", folder.path());
    assert!(prepared.starts_with("tokens: ") && prepared.contains("2 documents, "), "{prepared}");
    let train = "train --preset micro --batch 2 --threads 1 --steps 2 --dropout 0.1 --data";
    let hash = |said: &str| said.split_once("weights: sha256 ").unwrap().1[..64].to_owned();
    let of_text = said(&format!("{train} texts --out a"), folder.path());
    let of_shards = said(&format!("{train} tokens --out b"), folder.path());
    assert!(of_shards.contains("token shards in tokens"), "{of_shards}");
    assert_eq!(hash(&of_text), hash(&of_shards));
    let loss = |said: &str| said.rsplit_once("validation loss ").unwrap().1[..6].to_owned();
    assert_eq!(loss(&of_text), loss(&of_shards));

    fs::write(folder.path().join("lines.jsonl"), "{\"text\": \"a\"}\n{\"txt\": \"b\"}\n").unwrap();
    for (arguments, expected) in [
        ("data lines.jsonl --out new", "lines.jsonl, line 2: no field 'text'; name the field of the text with --field"),
        ("data texts --out tokens", "give another folder, or --overwrite"),
        ("data texts --out texts --overwrite", "texts: it holds "),
        ("data nothing --out new", "nothing does not exist"),
        ("data texts --out new --validation 1.5", "1.5 is neither a fraction below 1"),
        ("data texts --out new --validation 4000000", "the training part would be empty"),
        ("data texts --out new --shard-tokens 0", "--shard-tokens"),
    ] {
        let said = refused(&arguments.split(' ').collect::<Vec<_>>(), folder.path());
        assert!(said.contains(expected), "{arguments}: {said}");
        assert!(!folder.path().join("new").exists() && !folder.path().join(".new.partial").exists(), "{arguments}");
    }
}
