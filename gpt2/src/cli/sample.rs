//! `gpt2 sample`.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;

use super::CliError;
use super::train::{Pass, check_tensors};
use crate::checkpoint::Checkpoint;
use crate::devices::{CheckedDevice, DeviceChoice};
use crate::segments::SegmentedModel;
use crate::tokenizer::Tokenizer;
use comm_core::splitmix::SplitMix64;

#[derive(Clone, Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(super) struct SampleArgs {
    /// Checkpoint that `gpt2 train` saved.
    #[arg(long, default_value = "out/model.safetensors")]
    checkpoint: PathBuf,
    /// Text to continue, in which <|endoftext|> is one token for the gpt2 tokenizer. [default: for gpt2, trained on several documents, the
    /// token that ends one, so that a new one begins; else a line end; for chars that know none a blank, else the first of their characters]
    #[arg(long)]
    prompt: Option<String>,
    /// Go on after the end of a document, which ends the text by default (gpt2).
    #[arg(long)]
    no_stop: bool,
    /// Take <|endoftext|> for text, start from a line end, and do not stop: for a model trained with this option.
    #[arg(long)]
    no_special_tokens: bool,
    /// Tokens to write, at most.
    #[arg(long, default_value_t = 200)]
    tokens: usize,
    /// Divides the logits: below 1 for likelier text, above 1 for wilder; 0 always takes the likeliest token.
    #[arg(long, default_value_t = 0.8)]
    temperature: f32,
    /// Choose among so many of the likeliest tokens; 0 for all.
    #[arg(long, default_value_t = 200)]
    top_k: usize,
    /// Seed of the choices.
    #[arg(long, default_value_t = 1337)]
    seed: u64,
    /// Device that computes, as for `gpt2 train`.
    #[arg(long, default_value_t)]
    device: DeviceChoice,
}

pub(super) fn run(args: &SampleArgs) -> Result<(), CliError> {
    if !(args.temperature.is_finite() && args.temperature >= 0.0) {
        return Err(format!("--temperature {} must be zero or a positive number", args.temperature).into());
    }
    let checkpoint = Checkpoint::load(&args.checkpoint)?;
    let tokenizer: Tokenizer = serde_json::from_value(checkpoint.tokenizer.clone())
        .map_err(|error| format!("checkpoint {}: its tokenizer: {error}", args.checkpoint.display()))?;
    let CheckedDevice { device, largest_tensor } = args.device.open()?;
    if let Some(limit) = largest_tensor {
        check_tensors(args.device, limit, &checkpoint.config, Pass::Sampling)?;
    }
    let model = checkpoint.model(&device)?;
    let (known, has) = (tokenizer.vocab_size(), model.config().vocab_size);
    if known > has {
        return Err(format!(
            "checkpoint {}: its tokenizer has {known} tokens, but its model only {has}; the two do not belong together",
            args.checkpoint.display()
        )
        .into());
    }
    let end_of_text = tokenizer.end_of_text().filter(|_| !args.no_special_tokens);
    let (prompt, mut ids) = start(args.prompt.as_deref(), &tokenizer, end_of_text, checkpoint.several_documents)?;
    let mut random = SplitMix64::new(args.seed);
    let mut out = std::io::stdout().lock();
    write!(out, "{prompt}")?;
    // A token may end in the middle of a character: what is whole is printed.
    let mut pending: Vec<u8> = Vec::new();
    for _ in 0..args.tokens {
        let next = next_token(&model, &ids, args, &mut random)?;
        if end_of_text == Some(next) && !args.no_stop {
            break;
        }
        ids.push(next);
        pending.extend(tokenizer.decode_bytes(&[next])?);
        let whole = match std::str::from_utf8(&pending) {
            Ok(text) => text.len(),
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            Err(_) => pending.len(),
        };
        write!(out, "{}", String::from_utf8_lossy(&pending[..whole]))?;
        out.flush()?;
        pending.drain(..whole);
    }
    writeln!(out, "{}", String::from_utf8_lossy(&pending))?;
    Ok(())
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

/// Draws the token after `ids` from the model's distribution.
fn next_token(
    model: &SegmentedModel,
    ids: &[u16],
    args: &SampleArgs,
    random: &mut SplitMix64,
) -> Result<u16, CliError> {
    let context = &ids[ids.len().saturating_sub(model.config().block_size)..];
    let inputs: Vec<i32> = context.iter().map(|id| i32::from(*id)).collect();
    let last = model.last_logits(&inputs, 1, inputs.len())?;
    if last.iter().any(|logit| !logit.is_finite()) {
        return Err("the model's output is not finite: its training has diverged".into());
    }
    let mut order: Vec<usize> = (0..last.len()).collect();
    order.sort_unstable_by(|a, b| last[*b].total_cmp(&last[*a]));
    if args.temperature == 0.0 {
        return Ok(order[0] as u16);
    }
    if args.top_k > 0 {
        order.truncate(args.top_k);
    }
    let highest = last[order[0]];
    let weights: Vec<f64> = order.iter().map(|id| f64::from((last[*id] - highest) / args.temperature).exp()).collect();
    let mut left = random.unit() * weights.iter().sum::<f64>();
    for (id, weight) in order.iter().zip(&weights) {
        left -= weight;
        if left < 0.0 {
            return Ok(*id as u16);
        }
    }
    Ok(order[order.len() - 1] as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

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
