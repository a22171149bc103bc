//! Files that a user names, on a great many changed inputs: see `comm-core/tests/decoders.rs`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use burn::tensor::Device;
use comm_core::fuzzing::{CountingAllocator, Target, Verdict, run};
use gpt2::checkpoint::sharded::{Kind, Reader, Saved, Store, Whose};
use gpt2::checkpoint::{Checkpoint, StoredWeights};
use gpt2::config::ModelConfig;
use gpt2::corpus::prepare::{HeldOut, PrepareOptions, prepare};
use gpt2::corpus::{Corpus, CorpusSource, LoadOptions, TokenCache, TokenStream};
use gpt2::evaluation::Choices;
use gpt2::segments::layout;
use gpt2::strategy::StrategyKind;
use gpt2::tokenizer::{END_OF_TEXT, GPT2_VOCABULARY, Tokenizer, TokenizerKind};
use gpt2::trainer::{Checkpoints, Keep, Session, TrainConfig, train_keeping};
use isocomm::TransportOptions;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    // Its table is made once, and is no part of what an input takes.
    Tokenizer::gpt2().encode("warm").expect("text");
    LazyLock::force(&STATE);
    // What is read and hashed goes through buffers of 64 KiB.
    run(&[
        Target::new("token shard", token_shard, shard_seeds).inputs_per_case(4).memory(128 << 10, 16),
        Target::new("kept ids", |bytes| kept(bytes, "ids"), || kept_seeds("ids"))
            .inputs_per_case(2)
            .memory(128 << 10, 64),
        Target::new("note of a source", |bytes| kept(bytes, "source"), || kept_seeds("source"))
            .inputs_per_case(2)
            .memory(128 << 10, 64),
        Target::new("checkpoint", checkpoint, checkpoint_seeds).inputs_per_case(4).memory(4 << 20, 64),
        Target::new("model of transformers", transformers, || model_seeds("model.safetensors"))
            .inputs_per_case(2)
            .memory(4 << 20, 64),
        Target::new("config.json", |bytes| described("config.json", bytes), || model_seeds("config.json"))
            .inputs_per_case(2)
            .memory(4 << 20, 64),
        Target::new("tokenizer.json", |bytes| described("tokenizer.json", bytes), || model_seeds("tokenizer.json"))
            .inputs_per_case(2)
            .memory(4 << 20, 64),
        Target::new("index of tensors", |bytes| described(INDEX, bytes), || model_seeds(INDEX))
            .inputs_per_case(2)
            .memory(4 << 20, 64),
        Target::new("multiple choice", choices, choices_seeds).memory(128 << 10, 64),
        Target::new("state of a run", run_state, || vec![STATE.bytes("run.json")])
            .inputs_per_case(4)
            .memory(4 << 20, 64),
        Target::new("a rank's part", rank_part, || vec![STATE.bytes("rank-0.safetensors")])
            .inputs_per_case(4)
            .memory(4 << 20, 64),
        Target::new("model config", model_config, config_seeds).memory(4 << 20, 16),
        Target::new("tokenizer description", description, description_seeds).memory(128 << 10, 64),
        Target::new("text as bytes", |text| corpus_text(text, TokenizerKind::Bytes), text_seeds)
            .inputs_per_case(2)
            .memory(128 << 10, 32),
        Target::new("text as characters", |text| corpus_text(text, TokenizerKind::Chars), text_seeds)
            .inputs_per_case(2)
            .memory(128 << 10, 64),
        // Regular expressions make their states when a text first needs them, and keep them: any one input may be the one for which the
        // table of states doubles.
        Target::new("text for GPT-2", |text| corpus_text(text, TokenizerKind::Gpt2), text_seeds)
            .inputs_per_case(2)
            .memory(1 << 20, 512),
        Target::new("lines of JSON", json_lines, json_seeds).inputs_per_case(1).memory(6 << 20, 512),
        Target::new("token ids", token_ids, || vec![vec![1, 0, 2, 0, 80, 196], vec![0; 10], b"a b c d".repeat(4)])
            .memory(128 << 10, 64),
    ])
}

/// A file of that name with these bytes, in a folder that goes with it.
struct Named {
    folder: tempfile::TempDir,
    path: PathBuf,
}

impl Named {
    fn new(name: &str, bytes: &[u8]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join(name);
        fs::write(&path, bytes).expect("a short file");
        Named { folder, path }
    }
}

fn load(path: &Path, kind: TokenizerKind) -> Option<Corpus> {
    Corpus::load(&CorpusSource::Path(path.to_owned()), kind).ok()
}

fn ids(stream: &TokenStream) -> Vec<i64> {
    let mut ids = Vec::new();
    stream.read(0, stream.len(), &mut ids).expect("a stream can be read as far as it goes");
    assert_eq!(ids.len(), stream.len());
    ids.into_iter().map(i64::from).collect()
}

/// llm.c's and nanoGPT's `.bin` files.
fn token_shard(bytes: &[u8]) -> Verdict {
    let file = Named::new("shard.bin", bytes);
    let Some(corpus) = load(&file.path, TokenizerKind::Gpt2) else { return Verdict::Rejected };
    let all = [ids(corpus.train()), ids(corpus.validation())].concat();
    assert!(all.iter().all(|id| (0..GPT2_VOCABULARY as i64).contains(id)));
    let written: Vec<u8> = all.iter().flat_map(|id| (*id as u16).to_le_bytes()).collect();
    assert!(bytes.ends_with(&written) && [0, 1024].contains(&(bytes.len() - written.len())));
    assert_eq!(corpus.bytes() as usize, written.len());
    Verdict::Accepted
}

fn shard_seeds() -> Vec<Vec<u8>> {
    let words = |words: &[u16]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let tokens = words(&[1, 2, 3, 50_256, 0, 7, 8, 9, 10, 11, 12, 50_000]);
    let mut header: Vec<u8> = [20_240_520_u32, 1, 12].iter().flat_map(|number| number.to_le_bytes()).collect();
    header.resize(1024, 0);
    vec![tokens.clone(), [header, tokens].concat(), words(&[5, 6])]
}

/// What `gpt2 data` makes shards of: the documents, as another parser reads them.
fn json_lines(bytes: &[u8]) -> Verdict {
    let file = Named::new("all.jsonl", bytes);
    let out = file.path.with_file_name("tokens");
    let options = PrepareOptions {
        field: "text".into(),
        documents: true,
        shard_tokens: 1 << 20,
        held_out: HeldOut::NOTHING,
        overwrite: false,
    };
    let prepared = prepare(std::slice::from_ref(&file.path), &out, &options, &mut |_| ());
    let Ok(prepared) = prepared else {
        let left = fs::read_dir(file.folder.path()).expect("the folder is there").count();
        assert_eq!(left, 1, "something is left of what was refused");
        return Verdict::Rejected;
    };
    // Of the fields that are not asked for only the structure is looked at.
    let Ok(text) = std::str::from_utf8(bytes) else { return Verdict::Accepted };
    let lines = text.strip_prefix('\u{feff}').unwrap_or(text).split('\n').filter(|line| !line.trim_ascii().is_empty());
    let objects: Result<Vec<serde_json::Value>, _> =
        lines.map(|line| serde_json::from_str(line.trim_ascii())).collect();
    let Ok(objects) = objects else { return Verdict::Accepted };
    let strings = objects.iter().map(|object| object["text"].as_str().expect("a string"));
    let documents: Vec<String> = strings.map(str::to_owned).collect();
    let written = documents.iter().filter(|document| !document.trim_ascii().is_empty()).count();
    assert_eq!(prepared.documents, written as u64);
    let (mut bytes, mut is_after_mark) = (0, true);
    for document in documents.iter().filter(|document| !document.is_empty()) {
        if bytes > 0 && !is_after_mark {
            bytes += END_OF_TEXT.len();
        }
        // White space alone needs no other mark behind it.
        is_after_mark = document.trim_ascii().is_empty() && bytes > 0;
        bytes += document.len();
    }
    assert_eq!(prepared.bytes, bytes as u64);
    assert_eq!(load(&out, TokenizerKind::Gpt2).expect("shards").bytes(), 2 * prepared.train_tokens);
    Verdict::Accepted
}

fn json_seeds() -> Vec<Vec<u8>> {
    [
        "{\"text\": \"Zwölf Boxkämpfer\"}\n{\"id\": [1, {}], \"text\": \" a \\u00e9 \\n \", \"x\": null}\n\n{\"text\": \"\"}\n",
        "\u{feff}{\"text\":\"a <|endoftext|>\"}\r\n {\"text\":\"b\",\"text2\":1.5e3} ",
    ]
    .map(|lines| lines.as_bytes().to_vec())
    .into()
}

/// A text with characters of each length, and its ids in a cache: what lies there, in its place in the file or in the note of that kind.
struct Kept {
    folder: tempfile::TempDir,
    text: PathBuf,
    options: LoadOptions,
}

/// One text for all inputs, since a note belongs to a file, and to that alone.
static KEPT: LazyLock<Mutex<Kept>> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let text = folder.path().join("text.txt");
    fs::write(&text, "Zwölf Boxkämpfer jagen Viktor über den Sylter Deich: 漢字.\n").expect("a short file");
    let cache = TokenCache::new(folder.path().join("cache")).from_bytes(1);
    let kept = Kept { folder, text, options: LoadOptions { cache: Some(cache), ..LoadOptions::default() } };
    // A note is made of a file that nobody has touched for three seconds.
    let since = Instant::now();
    while kept.file("source").is_none() {
        assert!(since.elapsed() < Duration::from_secs(60), "no note is made");
        kept.load();
        std::thread::sleep(Duration::from_millis(100));
    }
    Mutex::new(kept)
});

impl Kept {
    fn load(&self) -> Corpus {
        let source = CorpusSource::Path(self.text.clone());
        Corpus::load_as(&source, TokenizerKind::Chars, &self.options, &mut |_| ()).expect("a right text")
    }

    fn file(&self, extension: &str) -> Option<PathBuf> {
        let files = fs::read_dir(self.folder.path().join("cache")).ok()?.map(|file| file.expect("a file").path());
        files.into_iter().find(|path| path.extension().is_some_and(|found| found == extension))
    }
}

/// Files of the cache of ids: whatever they hold, the ids are those of the text, and what is not right is written again.
fn kept(bytes: &[u8], extension: &str) -> Verdict {
    let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let path = kept.file(extension).expect("it was made");
    let good = fs::read(&path).expect("a short file");
    fs::remove_file(&path).expect("a file of ours");
    fs::write(&path, bytes).expect("a short file");
    let corpus = kept.load();
    let ids: Vec<u16> = [ids(corpus.train()), ids(corpus.validation())]
        .concat()
        .into_iter()
        .map(|id| u16::try_from(id).expect("an id"))
        .collect();
    assert_eq!(corpus.tokenizer().decode_bytes(&ids).expect("ids of the text"), fs::read(&kept.text).expect("a file"));
    assert_eq!(fs::read(&path).expect("a file"), good, "what is not right is written again");
    if bytes == good { Verdict::Accepted } else { Verdict::Rejected }
}

fn kept_seeds(extension: &str) -> Vec<Vec<u8>> {
    let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    vec![fs::read(kept.file(extension).expect("it was made")).expect("a short file")]
}

/// safetensors with our metadata.
fn checkpoint(bytes: &[u8]) -> Verdict {
    let file = Named::new("model.safetensors", bytes);
    let Ok(loaded) = Checkpoint::load(&file.path) else { return Verdict::Rejected };
    let segments = layout(&loaded.config).expect("a checked config");
    assert_eq!(segments.len(), loaded.weights.len());
    assert!(segments.iter().zip(&loaded.weights).all(|(info, flat)| info.len == flat.len()));
    let again = file.path.with_file_name("again.safetensors");
    loaded.save(&again).expect("room for a short file");
    let again = Checkpoint::load(&again).expect("what was saved can be loaded");
    let bits =
        |checkpoint: &Checkpoint| -> Vec<u32> { checkpoint.weights.iter().flatten().map(|w| w.to_bits()).collect() };
    assert_eq!(bits(&again), bits(&loaded));
    assert_eq!((&again.config, &again.tokenizer, again.step), (&loaded.config, &loaded.tokenizer, loaded.step));
    assert_eq!(again.several_documents, loaded.several_documents);
    Verdict::Accepted
}

fn checkpoint_seeds() -> Vec<Vec<u8>> {
    let seed = |n_layer, vocab_size, tokenizer: serde_json::Value| {
        let config = ModelConfig { n_layer, n_head: 1, n_embd: 2, block_size: 3, vocab_size };
        let weights = layout(&config).expect("a usable shape").iter().map(|info| vec![0.5; info.len]).collect();
        let file = Named::new("model.safetensors", b"");
        let checkpoint = Checkpoint { config, tokenizer, step: 42, several_documents: n_layer == 1, weights };
        checkpoint.save(&file.path).expect("room for a short file");
        fs::read(&file.path).expect("a short file")
    };
    vec![
        seed(1, 256, serde_json::json!({"kind": "bytes"})),
        seed(2, 3, serde_json::json!({"kind": "chars", "chars": "abc"})),
    ]
}

/// The name of an index of tensors.
const INDEX: &str = "model.safetensors.index.json";

/// The files of a model, by name.
type Files = Vec<(&'static str, Vec<u8>)>;

/// A model that transformers saved in one file, and the same with an index. Saved once: that waits for the disk.
static MODELS: LazyLock<[Files; 2]> = LazyLock::new(|| {
    let weights = checkpoint_seeds().swap_remove(1);
    let tensors = safetensors::SafeTensors::deserialize(&weights).expect("a right file");
    let plain = safetensors::serialize(tensors.iter(), None).expect("a right model");
    let json = |value: serde_json::Value| serde_json::to_vec(&value).expect("JSON");
    let config = json(serde_json::json!({
        "n_layer": 2, "n_head": 1, "n_embd": 2, "n_positions": 3, "vocab_size": 3, "activation_function": "gelu_new",
    }));
    let tokenizer = json(serde_json::json!({"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}}}));
    let names = tensors.names().into_iter();
    let map: serde_json::Map<_, _> = names.map(|name| (name.to_owned(), "one.safetensors".into())).collect();
    let index = json(serde_json::json!({"weight_map": map}));
    let described = vec![("config.json", config), ("tokenizer.json", tokenizer)];
    [
        [described.clone(), vec![("model.safetensors", plain.clone())]].concat(),
        [described, vec![("one.safetensors", plain), (INDEX, index)]].concat(),
    ]
});

/// That of the two which has the file `name`.
fn model_files(name: &str) -> &'static Files {
    &MODELS[usize::from(name == INDEX)]
}

fn model_seeds(name: &str) -> Vec<Vec<u8>> {
    model_files(name).iter().filter(|(other, _)| *other == name).map(|(_, bytes)| bytes.clone()).collect()
}

/// A folder with a model of which the file `name` is these bytes.
fn described(name: &str, bytes: &[u8]) -> Verdict {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (other, right) in model_files(name) {
        let bytes = if *other == name { bytes } else { right };
        fs::write(folder.path().join(other), bytes).expect("a short file");
    }
    let Ok(stored) = StoredWeights::open(folder.path()) else { return Verdict::Rejected };
    let loaded = stored.load().expect("what was checked can be loaded");
    let segments = layout(&loaded.config).expect("a checked config");
    assert!(segments.iter().zip(&loaded.weights).all(|(info, flat)| info.len == flat.len()));
    assert_eq!(stored.hash().expect("it can be read twice"), loaded.weights_hash());
    if let Some(tokenizer) = stored.tokenizer().expect("a checked tokenizer") {
        assert!(tokenizer.vocab_size() <= loaded.config.vocab_size);
    }
    Verdict::Accepted
}

/// Weights whose shape another file tells.
fn transformers(bytes: &[u8]) -> Verdict {
    described("model.safetensors", bytes)
}

/// llm.c's file of questions.
fn choices(bytes: &[u8]) -> Verdict {
    let Ok(test) = Choices::of_bytes(bytes) else { return Verdict::Rejected };
    let words: usize = test
        .questions()
        .iter()
        .map(|one| 6 + one.context.len() + one.choices.iter().map(|ids| 1 + ids.len()).sum::<usize>())
        .sum();
    assert_eq!(bytes.len(), 1024 + 2 * words);
    assert!(
        test.questions().iter().all(|question| question.right < question.choices.len() && !question.context.is_empty())
    );
    Verdict::Accepted
}

fn choices_seeds() -> Vec<Vec<u8>> {
    let mut header: Vec<u8> = [20_240_522_u32, 1, 2, 26].iter().flat_map(|number| number.to_le_bytes()).collect();
    header.resize(1024, 0);
    let question = |index: u16| [u16::MAX, 26, index, 1, 2, 2, 10, 50_256, 1, 3, 2, 4, 5];
    let words: Vec<u8> = [0, 1].into_iter().flat_map(question).flat_map(u16::to_le_bytes).collect();
    vec![[header, words].concat()]
}

/// The whole state of a short run, and the folder that it is in.
struct WholeState {
    _folder: tempfile::TempDir,
    path: PathBuf,
    saved: Saved,
}

/// One for all inputs, which lie in the place of its files for a while.
static STATE: LazyLock<WholeState> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let corpus =
        Corpus::load(&CorpusSource::Synthetic { seed: 1, bytes: 2_000 }, TokenizerKind::Bytes).expect("a text");
    let model = ModelConfig { n_layer: 1, n_head: 1, n_embd: 2, block_size: 8, vocab_size: 256 };
    let config = TrainConfig { steps: 2, global_batch: 1, ..TrainConfig::of(model, StrategyKind::Single) };
    let store = Store::new(folder.path());
    let checkpoints = Some(Checkpoints { store: store.clone(), every: 1, keep: 1 });
    let session = Session::threads(1, &TransportOptions::default()).expect("a rank alone").remove(0);
    let keep = Keep { checkpoints, ..Keep::default() };
    train_keeping(&config, &corpus, &session, &Device::flex(), &keep, &mut ()).expect("two steps");
    let path = store.latest().expect("it was saved");
    WholeState { _folder: folder, saved: Saved::open(&path).expect("it is whole"), path }
});

/// One input at a time.
static TURN: Mutex<()> = Mutex::new(());

impl WholeState {
    fn bytes(&self, name: &str) -> Vec<u8> {
        fs::read(self.path.join(name)).expect("a short file")
    }

    /// Runs `check` with these bytes in the place of a file.
    fn with(&self, name: &str, bytes: &[u8], check: impl FnOnce() -> Verdict) -> Verdict {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let good = self.bytes(name);
        fs::write(self.path.join(name), bytes).expect("a short file");
        let verdict = check();
        fs::write(self.path.join(name), good).expect("a short file");
        verdict
    }
}

/// `run.json`: what is changed is found out, unless it is white space.
fn run_state(bytes: &[u8]) -> Verdict {
    STATE.with("run.json", bytes, || match Saved::open(&STATE.path) {
        Ok(saved) => {
            assert_eq!(saved.state(), STATE.saved.state());
            Verdict::Accepted
        }
        Err(_) => Verdict::Rejected,
    })
}

/// A rank's file, whose hash nobody has looked at.
fn rank_part(bytes: &[u8]) -> Verdict {
    STATE.with("rank-0.safetensors", bytes, || {
        let mut reader = Reader::new(&STATE.saved, Whose::Mean);
        let read = (0..3).flat_map(|segment| Kind::ALL.map(|kind| (segment, kind)));
        let read =
            read.map(|(segment, kind)| reader.read(segment, kind, 1..3).map(|values| assert_eq!(values.len(), 2)));
        let is_right = read.collect::<Result<Vec<()>, _>>().is_ok();
        assert!(reader.read(3, Kind::Master, 0..0).is_err() && reader.read(2, Kind::Mean, 0..5).is_err());
        if is_right { Verdict::Accepted } else { Verdict::Rejected }
    })
}

/// A model's shape, and the sizes that follow from it.
fn model_config(bytes: &[u8]) -> Verdict {
    let Ok(config) = serde_json::from_slice::<ModelConfig>(bytes) else { return Verdict::Rejected };
    let Ok(segments) = layout(&config) else { return Verdict::Rejected };
    assert_eq!(segments.iter().map(|info| info.len).sum::<usize>(), config.parameter_count());
    assert!(config.flops_per_token(config.block_size).is_finite());
    Verdict::Accepted
}

fn config_seeds() -> Vec<Vec<u8>> {
    let small = ModelConfig { n_layer: 2, n_head: 2, n_embd: 32, block_size: 32, vocab_size: 61 };
    let largest = ModelConfig { n_layer: 48, n_head: 25, n_embd: 1600, block_size: 1024, vocab_size: GPT2_VOCABULARY };
    [small, largest].iter().map(|config| serde_json::to_vec(config).expect("a config can be written")).collect()
}

/// A tokenizer as checkpoints describe it.
fn description(bytes: &[u8]) -> Verdict {
    let Ok(tokenizer) = serde_json::from_slice::<Tokenizer>(bytes) else { return Verdict::Rejected };
    let written = serde_json::to_vec(&tokenizer).expect("a tokenizer can be written");
    assert!(serde_json::from_slice::<Tokenizer>(&written).is_ok_and(|again| again == tokenizer));
    assert!((1..=1 << 16).contains(&tokenizer.vocab_size()));
    let last = u16::try_from(tokenizer.vocab_size() - 1).expect("an id");
    let text = tokenizer.decode_bytes(&[0, last]).expect("ids of the vocabulary");
    // Bytes of a character, for the tokenizers that have no whole ones at both ends.
    if let Ok(ids) = tokenizer.encode_bytes(&text) {
        assert!(tokenizer.decode_bytes(&ids).is_ok_and(|again| again == text));
    }
    Verdict::Accepted
}

fn description_seeds() -> Vec<Vec<u8>> {
    let texts = [r#"{"kind":"gpt2"}"#, r#"{"kind":"bytes"}"#, r#"{"kind":"chars","chars":"\n abcdeéü漢"}"#];
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}

/// A text file.
fn corpus_text(bytes: &[u8], kind: TokenizerKind) -> Verdict {
    let file = Named::new("corpus.txt", bytes);
    let Some(corpus) = load(&file.path, kind) else { return Verdict::Rejected };
    let all = [ids(corpus.train()), ids(corpus.validation())].concat();
    let all: Vec<u16> = all.into_iter().map(|id| u16::try_from(id).expect("an id")).collect();
    assert!(all.iter().all(|id| usize::from(*id) < corpus.vocab_size()));
    assert_eq!(corpus.tokenizer().decode_bytes(&all).expect("ids of the vocabulary"), bytes);
    Verdict::Accepted
}

fn text_seeds() -> Vec<Vec<u8>> {
    let texts = [
        "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n",
        "don't  stop…   now\r\n\t 漢字 ümläut <|endoftext|> 12345 'S 'll\u{a0}\u{2003}x\n",
        "   \n\n\n     \u{85}\u{feff}a",
    ];
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}

/// Ids, as a sampler or a shard gives them, back to text.
fn token_ids(bytes: &[u8]) -> Verdict {
    let ids: Vec<u16> = bytes.as_chunks::<2>().0.iter().map(|pair| u16::from_le_bytes(*pair)).collect();
    let tokenizer = Tokenizer::gpt2();
    let Ok(text) = tokenizer.decode_bytes(&ids) else { return Verdict::Rejected };
    assert!(tokenizer.decode(&ids).is_ok());
    if let Ok(again) = tokenizer.encode_bytes(&text) {
        assert!(tokenizer.decode_bytes(&again).is_ok_and(|same| same == text));
    }
    Verdict::Accepted
}
