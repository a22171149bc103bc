//! `gpt2 sample`.

use std::cmp::Ordering;
use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use comm_core::splitmix::SplitMix64;

use super::model::OpenModel;
use super::train::Pass;
use super::{CliError, complain};
use crate::devices::DeviceChoice;
use crate::segments::{Generation, ModelError, SegmentedModel};
use crate::tokenizer::{Tokenizer, TokenizerKind};

#[derive(Clone, Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(super) struct SampleArgs {
    /// The model: a checkpoint that `gpt2 train` saved, or a GPT-2 that Hugging Face's transformers saved as safetensors (the file beside its
    /// config.json, the index of several files, or the folder).
    #[arg(long, default_value = "out/model.safetensors")]
    checkpoint: PathBuf,
    /// Text to continue. With the gpt2 tokenizer <|endoftext|> in it is one token. [default: with the gpt2 tokenizer, if the model was trained on
    /// several documents, the token <|endoftext|>, which begins a new document; otherwise a line end. A chars tokenizer without a line end takes a
    /// space, or else its first character]
    #[arg(long)]
    prompt: Option<String>,
    /// File with the text to continue, which is taken unchanged, with the line end at its end; - reads standard input.
    #[arg(long, conflicts_with = "prompt")]
    prompt_file: Option<PathBuf>,
    /// Stop when the model writes this text, which is left out. May be given several times.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Continue after the end of a document. By default it ends the text, with the gpt2 tokenizer.
    #[arg(long)]
    no_stop: bool,
    /// Treat <|endoftext|> as ordinary text, start from a line end, and do not stop at the end of a document: for a model that was trained with
    /// --no-special-tokens.
    #[arg(long)]
    no_special_tokens: bool,
    /// Most tokens to write.
    #[arg(long, default_value_t = 200)]
    tokens: usize,
    /// Number of texts to write, with a line of three hyphens between them.
    #[arg(long, default_value_t = 1)]
    samples: usize,
    /// Temperature, by which the logits are divided: below 1 makes likely tokens more likely, above 1 less; 0 always takes the most likely token.
    #[arg(long, default_value_t = 0.8)]
    temperature: f32,
    /// Choose only among this many most likely tokens (top-k); 0 for all.
    #[arg(long, default_value_t = 200)]
    top_k: usize,
    /// Of those, choose only among the most likely tokens that together have this probability (top-p), at least one; 1 for all.
    #[arg(long, default_value_t = 1.0)]
    top_p: f64,
    /// Random seed of the choices.
    #[arg(long, default_value_t = 1337)]
    seed: u64,
    /// For each token that is written compute all earlier ones again, instead of keeping their keys and values (no KV cache).
    #[arg(long)]
    no_cache: bool,
    /// Print at the end, on standard error, how many tokens a second were written.
    #[arg(long)]
    speed: bool,
    /// Tokenizer of a model whose files do not name one: gpt2, bytes.
    #[arg(long)]
    tokenizer: Option<TokenizerKind>,
    /// Device that computes, as for `gpt2 train`.
    #[arg(long, default_value_t)]
    device: DeviceChoice,
}

pub(super) fn run(args: &SampleArgs) -> Result<(), CliError> {
    check(args)?;
    let prompt = match &args.prompt_file {
        Some(path) => Some(read_prompt(path)?),
        None => args.prompt.clone(),
    };
    let open = OpenModel::open(&args.checkpoint, args.tokenizer, args.device, Pass::Sampling)?;
    let end_of_text = open.tokenizer.end_of_text().filter(|_| !args.no_special_tokens);
    let (prompt, ids) = start(prompt.as_deref(), &open.tokenizer, end_of_text, open.several_documents)?;
    let mut writing = Writing {
        args,
        tokenizer: &open.tokenizer,
        end_of_text: end_of_text.filter(|_| !args.no_stop),
        sampler: Sampler::new(args),
        out: io::stdout().lock(),
    };
    let mut sequence = Sequence::new(&open.model, !args.no_cache, ids);
    let begun = Instant::now();
    let first = sequence.logits()?;
    let (of_prompt, begun, mut count) = (begun.elapsed(), Instant::now(), 0);
    for sample in 0..args.samples {
        match writing.sample(sample, &prompt, sequence.clone(), &first) {
            Ok(tokens) => count += tokens,
            // Who has read enough is no failure.
            Err(WriteError::Out(error)) if error.kind() == io::ErrorKind::BrokenPipe => break,
            Err(WriteError::Out(error)) => return Err(error.into()),
            Err(WriteError::Other(error)) => return Err(error),
        }
    }
    if args.speed {
        let took = begun.elapsed().max(Duration::from_nanos(1)).as_secs_f64();
        // The first of each text comes from the prompt.
        let further = count.saturating_sub(args.samples);
        complain(format_args!(
            "prompt of {} tokens in {:.3} s; {further} tokens after the first in {took:.3} s, {:.1} a second",
            sequence.ids.len(),
            of_prompt.as_secs_f64(),
            further as f64 / took
        ));
    }
    Ok(())
}

/// Refuses settings that are out of range.
fn check(args: &SampleArgs) -> Result<(), CliError> {
    if !(args.temperature.is_finite() && args.temperature >= 0.0) {
        return Err(format!("--temperature {} must be zero or a positive number", args.temperature).into());
    }
    if !(args.top_p > 0.0 && args.top_p <= 1.0) {
        return Err(format!("--top-p {} must be above 0 and at most 1", args.top_p).into());
    }
    if args.samples == 0 {
        return Err("--samples must be at least 1".into());
    }
    if args.stop.iter().any(String::is_empty) {
        return Err("--stop is empty; give at least one character, or leave it out".into());
    }
    Ok(())
}

/// The text in a file, or of standard input.
fn read_prompt(path: &Path) -> Result<String, CliError> {
    let mut text = String::new();
    let read = if path == Path::new("-") {
        io::stdin().lock().read_to_string(&mut text)
    } else {
        fs::File::open(path).and_then(|mut file| file.read_to_string(&mut text))
    };
    read.map_err(|error| format!("--prompt-file {}: cannot read it: {error}", path.display()))?;
    if text.is_empty() {
        return Err(format!("--prompt-file {}: it is empty; give at least one character", path.display()).into());
    }
    Ok(text)
}

/// The text to show first, and its ids; `end_of_text` is the token that ends a document, where there is one and it is not text. Only a model
/// of `several_documents` has learnt what comes after it.
fn start(
    prompt: Option<&str>,
    tokenizer: &Tokenizer,
    end_of_text: Option<u16>,
    several_documents: bool,
) -> Result<(String, Vec<u16>), CliError> {
    if prompt == Some("") {
        return Err("--prompt is empty; give at least one character to start from, or leave it out".into());
    }
    Ok(match (prompt, end_of_text) {
        (Some(prompt), Some(_)) => (prompt.to_owned(), tokenizer.encode_documents(prompt)?),
        (None, Some(end)) if several_documents => (String::new(), vec![end]),
        (Some(prompt), None) => (prompt.to_owned(), tokenizer.encode(prompt)?),
        (None, _) => {
            let text = tokenizer.first_text();
            let ids = tokenizer.encode(&text)?;
            (text, ids)
        }
    })
}

/// The tokens of a text, and what is known of those before the last.
#[derive(Clone)]
struct Sequence<'a> {
    model: &'a SegmentedModel,
    /// With keys and values of the first tokens, where they are kept.
    generation: Option<Generation<'a>>,
    ids: Vec<i32>,
}

impl<'a> Sequence<'a> {
    fn new(model: &'a SegmentedModel, cached: bool, ids: Vec<u16>) -> Self {
        let ids = ids.into_iter().map(i32::from).collect();
        Sequence { model, generation: cached.then(|| Generation::new(model)), ids }
    }

    /// Logits of the next token.
    fn logits(&mut self) -> Result<Vec<f32>, ModelError> {
        let positions = self.model.config().block_size;
        if self.ids.len() > positions {
            // Each token moves to the position before, so that its keys and values are others.
            return Generation::new(self.model).push(&self.ids[self.ids.len() - positions..]);
        }
        match &mut self.generation {
            Some(generation) => generation.push(&self.ids[generation.len()..]),
            None => Generation::new(self.model).push(&self.ids),
        }
    }
}

/// What is needed to write texts.
struct Writing<'a> {
    args: &'a SampleArgs,
    tokenizer: &'a Tokenizer,
    /// The token that ends a text.
    end_of_text: Option<u16>,
    sampler: Sampler,
    out: io::StdoutLock<'static>,
}

/// Why a text was not written.
enum WriteError {
    Out(io::Error),
    Other(CliError),
}

impl<E: Into<CliError>> From<E> for WriteError {
    fn from(error: E) -> Self {
        WriteError::Other(error.into())
    }
}

impl Writing<'_> {
    /// Writes one text, and returns the number of its tokens.
    fn sample(
        &mut self,
        index: usize,
        prompt: &str,
        mut sequence: Sequence<'_>,
        first: &[f32],
    ) -> Result<usize, WriteError> {
        if index > 0 {
            self.write("---\n")?;
        }
        self.write(prompt)?;
        let mut logits = first.to_vec();
        let mut text = Unwritten::default();
        let mut count = 0;
        while count < self.args.tokens {
            let known = logits.get(..self.tokenizer.vocab_size()).unwrap_or(&logits);
            let next = self.sampler.next(known)?;
            if self.end_of_text == Some(next) {
                break;
            }
            count += 1;
            let (ready, stopped) = text.add(&self.tokenizer.decode_bytes(&[next])?, &self.args.stop);
            self.write(&ready)?;
            if stopped {
                break;
            }
            if count < self.args.tokens {
                sequence.ids.push(i32::from(next));
                logits = sequence.logits()?;
            }
        }
        self.write(&text.rest())?;
        self.write("\n")?;
        Ok(count)
    }

    fn write(&mut self, text: &str) -> Result<(), WriteError> {
        self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush()).map_err(WriteError::Out)
    }
}

/// What has been drawn and not written: the beginning of a character, or of a text that would end all.
#[derive(Default)]
struct Unwritten {
    bytes: Vec<u8>,
    text: String,
}

impl Unwritten {
    /// Takes a token's bytes, and gives what can be written now, and whether one of `stops` has come.
    fn add(&mut self, bytes: &[u8], stops: &[String]) -> (String, bool) {
        self.bytes.extend_from_slice(bytes);
        // A token may end in the middle of a character.
        let whole = match std::str::from_utf8(&self.bytes) {
            Ok(text) => text.len(),
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            Err(_) => self.bytes.len(),
        };
        let whole: Vec<u8> = self.bytes.drain(..whole).collect();
        self.text.push_str(&String::from_utf8_lossy(&whole));
        if let Some(at) = stops.iter().filter_map(|stop| self.text.find(stop.as_str())).min() {
            let ready = self.text[..at].to_owned();
            (self.text, self.bytes) = Default::default();
            return (ready, true);
        }
        let may_stop = |at: &usize| stops.iter().any(|stop| stop.starts_with(&self.text[*at..]));
        let held = self.text.char_indices().map(|(at, _)| at).find(may_stop).unwrap_or(self.text.len());
        let rest = self.text.split_off(held);
        (std::mem::replace(&mut self.text, rest), false)
    }

    /// All that is left, at the end.
    fn rest(self) -> String {
        self.text + &String::from_utf8_lossy(&self.bytes)
    }
}

/// Draws tokens from the model's distribution.
struct Sampler {
    temperature: f32,
    top_k: usize,
    top_p: f64,
    random: SplitMix64,
}

impl Sampler {
    fn new(args: &SampleArgs) -> Self {
        let SampleArgs { temperature, top_k, top_p, seed, .. } = *args;
        Sampler { temperature, top_k, top_p, random: SplitMix64::new(seed) }
    }

    /// The next token's id.
    fn next(&mut self, logits: &[f32]) -> Result<u16, CliError> {
        if logits.iter().any(|logit| !logit.is_finite()) {
            return Err("the model's output is not finite: its training has diverged".into());
        }
        let order = self.candidates(logits);
        let highest = order.first().map_or(0.0, |id| logits[*id]);
        if self.temperature == 0.0 {
            return Ok(order.first().map_or(0, |id| *id as u16));
        }
        let weights: Vec<f64> =
            order.iter().map(|id| f64::from((logits[*id] - highest) / self.temperature).exp()).collect();
        let weights = &weights[..nucleus(&weights, self.top_p)];
        let mut left = self.random.unit() * weights.iter().sum::<f64>();
        for (id, weight) in order.iter().zip(weights) {
            left -= weight;
            if left < 0.0 {
                return Ok(*id as u16);
            }
        }
        Ok(order[weights.len() - 1] as u16)
    }

    /// The ids to choose among, likeliest first; of equally likely ones the lower comes first.
    fn candidates(&self, logits: &[f32]) -> Vec<usize> {
        let likelier = |a: &usize, b: &usize| -> Ordering { logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)) };
        let mut order: Vec<usize> = (0..logits.len()).collect();
        let wanted = match (self.temperature == 0.0, self.top_k) {
            (true, _) => 1,
            (false, 0) => order.len(),
            (false, top_k) => top_k,
        };
        if wanted < order.len() {
            order.select_nth_unstable_by(wanted - 1, likelier);
            order.truncate(wanted);
        }
        order.sort_unstable_by(likelier);
        order
    }
}

/// How many of the first of `weights`, which fall, have the share `top_p` of their sum: at least one.
fn nucleus(weights: &[f64], top_p: f64) -> usize {
    if top_p >= 1.0 {
        return weights.len();
    }
    let wanted = top_p * weights.iter().sum::<f64>();
    let mut sum = 0.0;
    let before = weights.iter().take_while(|weight| {
        let goes_on = sum < wanted;
        sum += **weight;
        goes_on
    });
    before.count().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(temperature: f32, top_k: usize, top_p: f64) -> Sampler {
        Sampler { temperature, top_k, top_p, random: SplitMix64::new(7) }
    }

    #[test]
    fn tokens_are_drawn_among_the_likeliest() {
        let logits: Vec<f32> = [0.1f32, 0.4, 0.2, 0.3].map(f32::ln).to_vec();
        let drawn = |mut sampler: Sampler| {
            let mut counts = [0u32; 4];
            (0..2000).for_each(|_| counts[usize::from(sampler.next(&logits).unwrap())] += 1);
            counts
        };
        assert_eq!(drawn(sampler(0.0, 0, 1.0)), [0, 2000, 0, 0]);
        assert_eq!(drawn(sampler(1.0, 1, 1.0)), [0, 2000, 0, 0]);
        let [none, two, nothing, one] = drawn(sampler(1.0, 2, 1.0));
        assert_eq!((none, nothing), (0, 0));
        assert!((two as f64 / one as f64 - 4.0 / 3.0).abs() < 0.2, "{two} {one}");
        // 0.4 alone is not half of it; with 0.3 it is.
        for top_p in [0.41, 0.5, 0.7] {
            let [none, two, nothing, one] = drawn(sampler(1.0, 0, top_p));
            assert!((none, nothing) == (0, 0) && two > 900 && one > 700, "{top_p}: {two} {one}");
        }
        assert_eq!(drawn(sampler(1.0, 0, 0.4))[1], 2000);
        assert_eq!(drawn(sampler(1.0, 0, 1e-9))[1], 2000);
        let all = drawn(sampler(1.0, 0, 1.0));
        assert!(all.iter().zip([200, 800, 400, 600]).all(|(count, usual)| count.abs_diff(usual) < 80), "{all:?}");
        // Of equal ones the first.
        assert_eq!(sampler(0.0, 0, 1.0).next(&[1.0, 2.0, 2.0]).unwrap(), 1);
        assert!(sampler(1.0, 0, 1.0).next(&[1.0, f32::NAN]).is_err());
    }

    #[test]
    fn text_is_held_back_only_where_it_may_be_the_end() {
        let stops = ["END".to_owned(), "\n\n".to_owned()];
        let run = |pieces: &[&[u8]]| {
            let (mut text, mut written) = (Unwritten::default(), Vec::new());
            for piece in pieces {
                let (ready, stopped) = text.add(piece, &stops);
                written.push(ready);
                if stopped {
                    return (written, true);
                }
            }
            written.push(text.rest());
            (written, false)
        };
        let all = |written: &[&str]| written.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(run(&[b"an E", b"ND", b"never"]), (all(&["an ", ""]), true));
        assert_eq!(run(&[b"an E", b"vent"]), (all(&["an ", "Event", ""]), false));
        assert_eq!(run(&[b"EEN", b"D!"]), (all(&["E", ""]), true));
        assert_eq!(run(&[b"a\n", b"b\n", b"\nc"]), (all(&["a", "\nb", ""]), true));
        assert_eq!(run(&[b"a\n"]), (all(&["a", "\n"]), false));
        // Half a character waits; what is none is replaced.
        assert_eq!(run(&[b"\xc3", b"\xa4", b"\xc3"]), (all(&["", "ä", "", "\u{fffd}"]), false));
        assert_eq!(run(&[b"a\xffb"]), (all(&["a\u{fffd}b", ""]), false));
    }

    #[test]
    fn there_is_a_start_for_every_tokenizer() {
        let gpt2 = Tokenizer::gpt2();
        let end = gpt2.end_of_text();
        assert_eq!(start(None, &gpt2, end, true).unwrap(), (String::new(), vec![50_256]));
        assert_eq!(start(None, &gpt2, end, false).unwrap(), ("\n".into(), vec![198]));
        assert_eq!(start(None, &gpt2, None, true).unwrap(), ("\n".into(), vec![198]));
        let prompt = "Hello<|endoftext|>";
        assert_eq!(start(Some(prompt), &gpt2, end, false).unwrap(), (prompt.into(), vec![15_496, 50_256]));
        assert!(start(Some(prompt), &gpt2, None, false).unwrap().1.len() > 2);
        assert_eq!(start(None, &Tokenizer::bytes(), None, false).unwrap(), ("\n".into(), vec![10]));
        for (text, first, id) in [("b\na ", "\n", 0), ("b a", " ", 0), ("ba!", "!", 0)] {
            let chars = Tokenizer::chars_of(text).unwrap();
            assert_eq!(start(None, &chars, None, false).unwrap(), (first.into(), vec![id]));
        }
        assert!(start(Some(""), &gpt2, end, true).unwrap_err().to_string().contains("--prompt"));
    }
}
