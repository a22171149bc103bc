//! Models between this program and Hugging Face's transformers: `reference/hugging_face.py` made what is compared with.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use burn::tensor::Device;
use gpt2::checkpoint::{Checkpoint, CheckpointError, StoredWeights};
use gpt2::config::ModelConfig;
use gpt2::segments::{Generation, ModelError, SegmentedModel, TokenBatch};
use gpt2::tokenizer::{Tokenizer, TokenizerKind};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::cli::{gpt2, refused};

/// The largest difference that is allowed, over the largest value of a tensor.
const TOLERANCE: f32 = 1e-4;

fn reference() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("reference/hugging_face")
}

const MODELS: [&str; 3] = ["prefixed", "sharded", "headed"];

/// What transformers computes with a model.
struct Expected {
    floats: HashMap<String, Vec<f32>>,
    tokens: HashMap<String, Vec<i32>>,
    rows: usize,
    cols: usize,
}

impl Expected {
    fn read(folder: &Path) -> Self {
        let bytes = fs::read(folder.join("reference.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let (mut floats, mut tokens) = (HashMap::new(), HashMap::new());
        for (name, view) in file.tensors() {
            let words = view.data().as_chunks::<4>().0.iter();
            match view.dtype() {
                Dtype::F32 => _ = floats.insert(name, words.map(|word| f32::from_le_bytes(*word)).collect()),
                _ => _ = tokens.insert(name, words.map(|word| i32::from_le_bytes(*word)).collect()),
            }
        }
        let shape = file.tensor("inputs").unwrap().shape().to_vec();
        Expected { floats, tokens, rows: shape[0], cols: shape[1] }
    }

    fn batch(&self) -> TokenBatch {
        let [inputs, targets] = ["inputs", "targets"].map(|name| self.tokens[name].clone());
        TokenBatch { inputs, targets, rows: self.rows, cols: self.cols }
    }

    fn assert_close(&self, name: &str, found: &[f32]) {
        let expected = &self.floats[name];
        assert_eq!(found.len(), expected.len(), "{name}");
        let scale = expected.iter().fold(0.0f32, |a, b| a.max(b.abs()));
        let off = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
        let worst = off.fold(0.0f32, |a, b| if b > a || b.is_nan() { b } else { a });
        assert!(worst <= TOLERANCE * scale, "{name}: off by {worst}, with values up to {scale}");
    }
}

/// Logits, loss, gradients and generated tokens of the model in `folder` are those beside it.
fn compare(folder: &Path) {
    let expected = Expected::read(folder);
    let mut model = Checkpoint::load(folder).unwrap().model(&Device::flex()).unwrap();
    let batch = expected.batch();
    expected.assert_close("logits", &model.logits(&batch.inputs, batch.rows, batch.cols).unwrap());
    expected.assert_close("loss", &[model.loss(&batch).unwrap() as f32]);
    let mut all = vec![Vec::new(); model.segments().len()];
    let loss = model
        .forward_backward(&batch, 1.0, &mut |segment, grads| {
            all[segment] = grads.into_flat()?;
            Ok::<_, ModelError>(())
        })
        .unwrap();
    expected.assert_close("loss", &[loss as f32]);
    let mut compared = 3;
    for (info, flat) in model.segments().iter().zip(&all) {
        for param in &info.params {
            expected.assert_close(&format!("grad.{}", param.path), &flat[param.offset..param.offset + param.len]);
            compared += 1;
        }
    }
    assert_eq!(compared, expected.floats.len() + 1, "a gradient is not compared");
    let generated = &expected.tokens["generated"];
    assert_eq!(greedy(&model, &generated[..3], generated.len(), true), *generated);
    assert_eq!(greedy(&model, &generated[..3], generated.len(), false), *generated);
}

/// The likeliest tokens after `prompt`, up to `len` in all, with keys and values kept or not.
fn greedy(model: &SegmentedModel, prompt: &[i32], len: usize, cached: bool) -> Vec<i32> {
    let mut tokens = prompt.to_vec();
    let mut generation = Generation::new(model);
    while tokens.len() < len {
        if !cached {
            generation = Generation::new(model);
        }
        let logits = generation.push(&tokens[generation.len()..]).unwrap();
        let likeliest = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
        tokens.push(likeliest as i32);
    }
    tokens
}

#[test]
fn models_of_transformers_compute_the_same_here() {
    for name in MODELS {
        compare(&reference().join(name));
    }
}

#[test]
fn what_is_saved_is_what_transformers_opened() {
    let opened = fs::read(reference().join("opened.json")).unwrap();
    let opened: BTreeMap<String, BTreeMap<String, String>> = serde_json::from_slice(&opened).unwrap();
    assert_eq!(opened.len(), MODELS.len());
    for (name, files) in opened {
        let folder = tempfile::tempdir().unwrap();
        let (input, kind) = (reference().join(&name), if name == "sharded" { "chars" } else { "bytes" });
        let mut arguments = vec!["convert", input.to_str().unwrap(), "saved"];
        if kind == "bytes" {
            arguments.extend(["--tokenizer", kind]);
        }
        let output = gpt2(&arguments, folder.path());
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
        let saved = folder.path().join("saved");
        let found = fs::read_dir(&saved).unwrap().map(|entry| {
            let path = entry.unwrap().path();
            let hash = comm_core::hex(&Sha256::digest(fs::read(&path).unwrap()));
            (path.file_name().unwrap().to_str().unwrap().to_owned(), hash)
        });
        assert_eq!(found.collect::<BTreeMap<_, _>>(), files, "{name}");
        // The same weights, and what a run would save with them.
        let stored = StoredWeights::open(&saved).unwrap();
        let hash = stored.hash().unwrap();
        assert!(said.contains(&format!("weights: sha256 {hash}")), "{said}");
        assert_eq!(StoredWeights::open(&input).unwrap().hash().unwrap(), hash);
        assert_eq!(stored.tokenizer().unwrap().unwrap().kind().to_string(), kind);
        // transformers saves models without what this program adds to the file of weights.
        let bytes = fs::read(saved.join("model.safetensors")).unwrap();
        let plain = safetensors::serialize(SafeTensors::deserialize(&bytes).unwrap().iter(), None).unwrap();
        fs::write(saved.join("model.safetensors"), plain).unwrap();
        let again = StoredWeights::open(&saved).unwrap();
        assert_eq!(again.tokenizer().unwrap(), stored.tokenizer().unwrap());
        assert_eq!((again.hash().unwrap(), again.config()), (hash, stored.config()));
    }
}

/// Python with transformers, if there is one: of the virtual environment, else of the system.
fn python() -> Result<PathBuf, String> {
    let active = std::env::var_os("VIRTUAL_ENV").map(|folder| Path::new(&folder).join("bin/python"));
    let python = active.unwrap_or_else(|| "python3".into());
    let check = "import torch, transformers, safetensors";
    let output = Command::new(&python).args(["-c", check]).output().map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(python) } else { Err(said.lines().last().unwrap_or_default().to_owned()) }
}

#[test]
fn transformers_agrees_both_ways() {
    let python = match python() {
        Ok(python) => python,
        Err(why) => {
            eprintln!("skipped: Python has no transformers ({why}); see CONTRIBUTING.md");
            return;
        }
    };
    let folder = tempfile::tempdir().unwrap();
    let gpt2 = Tokenizer::gpt2();
    let texts = [
        "Don't  stop:\r\n\u{a0} 12345 Straße 漢字\u{1f980}<|endoftext|>x ",
        "we'll\n\n\n  see   <|endoftext|><|endoftext|>",
        include_str!("hugging_face.rs"),
    ];
    let cases: Vec<Value> =
        texts.iter().map(|text| json!({"text": text, "ids": gpt2.encode_documents(text).unwrap()})).collect();
    fs::write(folder.path().join("ids.json"), serde_json::to_vec(&cases).unwrap()).unwrap();
    let seed = (nanoseconds() % 1_000_000).to_string();
    let output = Command::new(python)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("reference/hugging_face.py"))
        .arg("live")
        .arg(folder.path())
        .arg(env!("CARGO_BIN_EXE_gpt2"))
        .arg(&seed)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "seed {seed}: {said}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("both agree"), "seed {seed}: {said}");
    for name in MODELS {
        compare(&folder.path().join(name));
    }
}

/// Of the time of day: other models in each run.
fn nanoseconds() -> u32 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().subsec_nanos()
}

#[test]
fn a_run_starts_from_a_checkpoint_with_every_strategy() {
    let folder = tempfile::tempdir().unwrap();
    let text = "The quick brown dogs boil,\n".repeat(60);
    let known: String =
        Checkpoint::load(&reference().join("sharded")).unwrap().tokenizer["chars"].as_str().unwrap().into();
    fs::write(folder.path().join("text.txt"), text.chars().filter(|c| known.contains(*c)).collect::<String>()).unwrap();
    let input = reference().join("sharded");
    let hash = StoredWeights::open(&input).unwrap().hash().unwrap();
    let cut = StoredWeights::open(&input).unwrap().with_block_size(8).unwrap().hash().unwrap();
    assert_ne!(hash, cut);
    for (more, expected) in [
        ("--strategy single", &hash),
        ("--strategy ddp --transport tcp-raw --nproc 2", &hash),
        ("--strategy fsdp --transport local --nproc 2", &hash),
        ("--strategy single --block-size 8", &cut),
    ] {
        let out = folder.path().join("out");
        // Steps too small to be seen.
        let arguments = "train --data text.txt --steps 1 --batch 2 --eval-every 0 --threads 1 --lr 1e-30 --out out --overwrite --init-from";
        let arguments: Vec<&str> =
            arguments.split(' ').chain([input.to_str().unwrap()]).chain(more.split(' ')).collect();
        let output = gpt2(&arguments, folder.path());
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{more}: {said}{}", String::from_utf8_lossy(&output.stderr));
        assert!(said.contains(&format!("weights: sha256 {expected}")), "{more}: {said}");
        let saved = StoredWeights::open(&out).unwrap();
        assert_eq!(saved.tokenizer().unwrap().unwrap().kind(), TokenizerKind::Chars);
        for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
            assert!(out.join(name).exists(), "{name}");
        }
    }
}

/// A model in a folder of its own, to be spoilt.
struct Spoilt {
    folder: tempfile::TempDir,
}

impl Spoilt {
    fn new(name: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("model")).unwrap();
        for entry in fs::read_dir(reference().join(name)).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, folder.path().join("model").join(path.file_name().unwrap())).unwrap();
        }
        Spoilt { folder }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join("model").join(name)
    }

    /// Changes a JSON file.
    fn json(&self, name: &str, change: impl Fn(&mut Value)) {
        let mut value = serde_json::from_slice(&fs::read(self.file(name)).unwrap()).unwrap();
        change(&mut value);
        fs::write(self.file(name), serde_json::to_vec(&value).unwrap()).unwrap();
    }

    /// Changes the tensors of the one file of weights.
    fn tensors(&self, change: impl Fn(&mut BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>)) {
        let path = self.file("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        let mut tensors = SafeTensors::deserialize(&bytes)
            .unwrap()
            .iter()
            .map(|(name, view)| (name.to_owned(), (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
            .collect();
        change(&mut tensors);
        let views = tensors
            .iter()
            .map(|(name, (dtype, shape, data))| (name.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap()));
        fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
    }

    /// What `gpt2 convert` says, once; nothing is left.
    fn convert(&self, more: &[&str]) -> String {
        let said = refused(&[&["convert", "model", "out"], more].concat(), self.folder.path());
        assert!(!self.folder.path().join("out").exists(), "{said}");
        said
    }
}

fn assert_says(said: &str, expected: &[&str]) {
    for expected in expected {
        assert!(said.contains(expected), "{expected:?} is not in {said}");
    }
}

#[test]
fn a_setting_that_this_model_does_not_have_is_refused_by_name() {
    let spoilt = Spoilt::new("prefixed");
    for (setting, value) in [
        ("model_type", json!("llama")),
        ("activation_function", json!("relu")),
        ("activation_function", json!("gelu")),
        ("layer_norm_epsilon", json!(1e-6)),
        ("n_inner", json!(48)),
        ("scale_attn_weights", json!(false)),
        ("scale_attn_by_inverse_layer_idx", json!(true)),
        ("add_cross_attention", json!(true)),
        ("tie_word_embeddings", json!(false)),
        ("pruned_heads", json!({"0": [1]})),
        ("quantization_config", json!({"bits": 4})),
    ] {
        let whole = fs::read(spoilt.file("config.json")).unwrap();
        spoilt.json("config.json", |config| config[setting] = value.clone());
        let error = StoredWeights::open(&spoilt.file("")).unwrap_err();
        assert!(matches!(error, CheckpointError::Unsupported { .. }), "{error}");
        assert_says(&error.to_string(), &[setting, &value.to_string(), "config.json"]);
        fs::write(spoilt.file("config.json"), whole).unwrap();
    }
    spoilt.json("config.json", |config| config["activation_function"] = "relu".into());
    assert_says(&spoilt.convert(&["--tokenizer", "bytes"]), &["activation_function", "relu"]);
    // What says the same in other words is taken.
    spoilt.json("config.json", |config| {
        config["activation_function"] = "gelu_pytorch_tanh".into();
        config["n_inner"] = 64.into();
        config["pruned_heads"] = json!({});
        config["reorder_and_upcast_attn"] = true.into();
    });
    StoredWeights::open(&spoilt.file("")).unwrap();
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let name = "transformer.h.1.mlp.c_fc.bias";
    type Change = fn(&mut BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>);
    let cases: [(Change, &[&str]); 6] = [
        (|tensors| _ = tensors.remove("transformer.h.1.mlp.c_fc.bias"), &["no tensor", "h.1.mlp.c_fc.bias"]),
        (
            |tensors| tensors.get_mut("transformer.wte.weight").unwrap().1 = vec![128, 32],
            &["wte.weight", "[128, 32]", "[256, 16]"],
        ),
        (
            |tensors| tensors.get_mut("transformer.h.1.mlp.c_fc.bias").unwrap().0 = Dtype::I32,
            &["h.1.mlp.c_fc.bias", "I32", "F32, F16 or BF16"],
        ),
        (
            |tensors| {
                let head = tensors["transformer.h.1.mlp.c_fc.bias"].clone();
                _ = tensors.insert("score.weight".into(), head);
            },
            &["does not have", "score.weight"],
        ),
        (
            |tensors| {
                let twice = tensors["transformer.ln_f.bias"].clone();
                _ = tensors.insert("ln_f.bias".into(), twice);
            },
            &["twice", "ln_f.bias"],
        ),
        (
            |tensors| {
                let mut head = tensors["transformer.wte.weight"].clone();
                head.2[4000] ^= 1;
                _ = tensors.insert("lm_head.weight".into(), head);
            },
            &["lm_head.weight", "wte.weight", "are not tied"],
        ),
    ];
    for (change, expected) in cases {
        let spoilt = Spoilt::new("prefixed");
        spoilt.tensors(|tensors| assert!(tensors.contains_key(name)));
        spoilt.tensors(change);
        assert_says(&spoilt.convert(&["--tokenizer", "bytes"]), expected);
    }
    // A shape that only the config says.
    let spoilt = Spoilt::new("headed");
    spoilt.json("config.json", |config| config["n_embd"] = 48.into());
    assert_says(&spoilt.convert(&["--tokenizer", "bytes"]), &["wte.weight", "[256, 24]", "[256, 48]"]);
    spoilt.json("config.json", |config| _ = config.as_object_mut().unwrap().remove("n_head"));
    assert_says(&spoilt.convert(&["--tokenizer", "bytes"]), &["config.json", "no n_head"]);
}

#[test]
fn files_that_are_cut_missing_or_of_another_kind_are_named() {
    let spoilt = Spoilt::new("prefixed");
    let path = spoilt.file("model.safetensors");
    let whole = fs::read(&path).unwrap();
    for cut in [0, 7, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..cut]).unwrap();
        assert_says(&spoilt.convert(&[]), &["model.safetensors", "cut off"]);
    }
    fs::write(&path, whole).unwrap();
    fs::write(spoilt.file("config.json"), "{\"n_layer\": 2").unwrap();
    assert_says(&spoilt.convert(&[]), &["config.json", "not JSON"]);
    fs::remove_file(spoilt.file("config.json")).unwrap();
    assert_says(&spoilt.convert(&[]), &["no config.json"]);
    fs::rename(&path, spoilt.file("pytorch_model.bin")).unwrap();
    assert_says(&spoilt.convert(&[]), &["model.safetensors.index.json", "pytorch_model.bin", "safetensors"]);

    let spoilt = Spoilt::new("sharded");
    let index = fs::read(spoilt.file("model.safetensors.index.json")).unwrap();
    spoilt.json("model.safetensors.index.json", |index| index["weight_map"]["ln_f.bias"] = "../x.safetensors".into());
    assert_says(&spoilt.convert(&[]), &["../x.safetensors", "not a file in its folder"]);
    fs::write(spoilt.file("model.safetensors.index.json"), &index).unwrap();
    spoilt.json("model.safetensors.index.json", |index| {
        let map = &mut index["weight_map"];
        map["ln_f.bias"] =
            if map["ln_f.bias"] == map["wpe.weight"] { map["wte.weight"].clone() } else { map["wpe.weight"].clone() };
    });
    assert_says(&spoilt.convert(&[]), &["ln_f.bias", "which does not have it"]);
    fs::write(spoilt.file("model.safetensors.index.json"), "[]").unwrap();
    assert_says(&spoilt.convert(&[]), &["index.json", "not an index"]);
    fs::write(spoilt.file("model.safetensors.index.json"), index).unwrap();
    fs::remove_file(spoilt.file("model-00002-of-00003.safetensors")).unwrap();
    assert_says(&spoilt.convert(&[]), &["model-00002-of-00003.safetensors"]);
}

#[test]
fn a_vocabulary_of_another_tokenizer_is_refused() {
    let spoilt = Spoilt::new("prefixed");
    assert_says(&spoilt.convert(&[]), &["--tokenizer"]);
    assert_says(&spoilt.convert(&["--tokenizer", "gpt2"]), &["50257 tokens", "256"]);
    assert_says(&spoilt.convert(&["--tokenizer", "chars"]), &["do not list the model's characters"]);
    let folder = spoilt.folder.path();
    fs::write(folder.join("text.txt"), "The quick brown fox. ".repeat(50)).unwrap();
    let train = |more: &[&str]| {
        let arguments = ["train", "--data", "text.txt", "--batch", "2", "--out", "trained", "--init-from", "model"];
        let said = refused(&[&arguments[..], more].concat(), folder);
        assert!(!folder.join("trained/model.safetensors").exists());
        said
    };
    assert_says(&train(&[]), &["--init-from", "--tokenizer"]);
    assert_says(&train(&["--tokenizer", "gpt2"]), &["50257 tokens", "256"]);
    assert_says(&train(&["--tokenizer", "bytes", "--block-size", "13"]), &["12 positions", "--block-size 13"]);
    assert_says(&train(&["--tokenizer", "bytes", "--preset", "micro"]), &["--preset micro", "another size"]);
    // One that this program does not have.
    fs::write(spoilt.file("tokenizer.json"), r#"{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}}"#).unwrap();
    assert_says(&spoilt.convert(&[]), &["tokenizer.json", "of 2 tokens", "is not one of"]);
    let spoilt = Spoilt::new("sharded");
    fs::write(spoilt.folder.path().join("text.txt"), "Qux ".repeat(100)).unwrap();
    let arguments = ["train", "--data", "text.txt", "--batch", "2", "--init-from", "model"];
    assert_says(&refused(&arguments, spoilt.folder.path()), &["'Q'"]);
    assert_says(&refused(&[&arguments[..], &["--tokenizer", "gpt2"]].concat(), spoilt.folder.path()), &["chars"]);
}

#[test]
fn nothing_half_written_is_left_where_saving_fails() {
    let spoilt = Spoilt::new("sharded");
    let folder = spoilt.folder.path();
    // More than this no file may have: as on a disk that is full.
    let output = Command::new("sh")
        .args(["-c", "ulimit -f 8; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_gpt2"), "convert", "model", "out"])
        .current_dir(folder)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert_says(&said, &["out/model.safetensors", "File too large"]);
    assert_eq!(fs::read_dir(folder.join("out")).unwrap().count(), 0);
    fs::remove_dir(folder.join("out")).unwrap();
    // A file where a folder should be is refused for every user, root included.
    fs::write(folder.join("taken"), "").unwrap();
    for out in ["taken/out", "/proc/isocomm"] {
        assert_says(&refused(&["convert", "model", out], folder), &[out, "cannot write there"]);
    }
    // What is there stays.
    assert_says(&refused(&["convert", "model", "model"], folder), &["holds a model", "--overwrite"]);
    let before = StoredWeights::open(&spoilt.file("")).unwrap().hash().unwrap();
    let output = gpt2(&["convert", "model", "model", "--overwrite"], folder);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let after = StoredWeights::open(&spoilt.file("")).unwrap();
    assert_eq!((after.hash().unwrap(), after.path()), (before, spoilt.file("model.safetensors").as_path()));
}

#[test]
fn text_is_the_same_with_and_without_kept_keys() {
    let folder = tempfile::tempdir().unwrap();
    let config = ModelConfig { n_layer: 3, n_head: 4, n_embd: 32, block_size: 24, vocab_size: 256 };
    let mut model = SegmentedModel::new(config, 3, &Device::flex()).unwrap();
    // Larger weights than at the start of training, so that texts do not repeat one token.
    for (segment, info) in model.segments().to_vec().iter().enumerate() {
        let mut flat = model.read_params(segment).unwrap();
        for param in info.params.iter().filter(|param| param.decay) {
            flat[param.offset..param.offset + param.len].iter_mut().for_each(|weight| *weight *= 10.0);
        }
        model.write_params(segment, &flat).unwrap();
    }
    let checkpoint = Checkpoint::of(&model, json!({"kind": "bytes"}), 1).unwrap();
    checkpoint.save(&folder.path().join("model.safetensors")).unwrap();
    let sample = |more: &str| {
        let arguments = "sample --checkpoint model.safetensors --prompt The --tokens 40";
        let output = gpt2(&arguments.split(' ').chain(more.split(' ')).collect::<Vec<_>>(), folder.path());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    // Beyond the model's positions, too.
    for more in ["--temperature 0", "--temperature 1 --samples 3", "--temperature 1 --top-p 0.9 --top-k 0"] {
        let cached = sample(more);
        assert!(cached.len() > 40, "{more}");
        assert_eq!(sample(&format!("{more} --no-cache")), cached, "{more}");
    }
    // As the whole model computes them.
    let prompt: Vec<i32> = "The".bytes().map(i32::from).collect();
    let tokens = greedy(&model, &prompt, 24, true);
    assert!(tokens.iter().collect::<std::collections::BTreeSet<_>>().len() > 4, "{tokens:?}");
    for len in 3..24 {
        let logits = model.logits(&tokens[..len], 1, len).unwrap();
        let last = &logits[256 * (len - 1)..];
        let likeliest = (0..256).max_by(|a, b| last[*a].total_cmp(&last[*b])).unwrap();
        assert_eq!(likeliest as i32, tokens[len], "token {len}");
    }
    let mut generation = Generation::new(&model);
    assert!(generation.is_empty() && generation.push(&[]).is_err() && generation.push(&[256]).is_err());
    generation.push(&tokens[..24]).unwrap();
    assert!(generation.is_full() && generation.push(&[1]).is_err());
    assert_eq!(generation.len(), 24);
}
