//! The files of a tokenizer, as Hugging Face's libraries read them. Each tokenizer of this program has a form there: GPT-2's its own; raw
//! bytes that of byte-level encoding without merges; characters a list of words that are one character long.

use std::collections::HashMap;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::CheckpointError;
use super::stored::read_short;
use crate::tokenizer::{END_OF_TEXT, GPT2_VOCABULARY, Tokenizer, TokenizerKind};

/// The file that has everything.
pub(super) const TOKENIZER: &str = "tokenizer.json";
/// The file that says which class of the library reads it.
pub(super) const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// GPT-2's ids by token, for readers of its first files.
pub(super) const VOCABULARY: &str = "vocab.json";
/// GPT-2's merges in order, for readers of its first files.
pub(super) const MERGES: &str = "merges.txt";

/// Ids that a byte-level encoding begins with: one for each byte.
const BYTES: usize = 256;
/// A vocabulary of GPT-2's tokens may be padded for speed; nanoGPT's has so many ids.
const GPT2_PADDED: usize = 50_304;

/// The files of `tokenizer` for a model of so many positions, as names and contents.
///
/// # Errors
/// `serde_json`'s, which values of these types do not give.
pub(super) fn files(
    tokenizer: &Tokenizer,
    block_size: usize,
) -> Result<Vec<(&'static str, Vec<u8>)>, serde_json::Error> {
    let mut config = json!({"clean_up_tokenization_spaces": false, "model_max_length": block_size});
    let mut more = Vec::new();
    let described = match tokenizer.kind() {
        TokenizerKind::Gpt2 => {
            config["tokenizer_class"] = "GPT2Tokenizer".into();
            config["add_prefix_space"] = false.into();
            for name in ["bos_token", "eos_token", "unk_token"] {
                config[name] = END_OF_TEXT.into();
            }
            let names = gpt2_names(tokenizer);
            let merges = gpt2_merges(tokenizer, &names);
            let vocabulary = vocabulary(names.into_iter().chain([END_OF_TEXT.to_owned()]));
            more.push((VOCABULARY, serde_json::to_vec(&vocabulary)?));
            let lines: String = merges.iter().map(|merge| format!("{merge}\n")).collect();
            more.push((MERGES, format!("#version: 0.2\n{lines}").into_bytes()));
            let mut described = byte_level(vocabulary, &merges, true);
            described["added_tokens"] = json!([{
                "id": GPT2_VOCABULARY - 1, "content": END_OF_TEXT, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true,
            }]);
            described
        }
        TokenizerKind::Bytes => {
            config["tokenizer_class"] = ANY_CLASS.into();
            byte_level(vocabulary((0..=u8::MAX).map(|byte| name_of_byte(byte).to_string())), &[], false)
        }
        TokenizerKind::Chars => {
            config["tokenizer_class"] = ANY_CLASS.into();
            characters(tokenizer)
        }
    };
    let mut files =
        vec![(TOKENIZER, serde_json::to_vec(&described)?), (TOKENIZER_CONFIG, serde_json::to_vec_pretty(&config)?)];
    files.extend(more);
    Ok(files)
}

/// The class that reads any `tokenizer.json`.
const ANY_CLASS: &str = "PreTrainedTokenizerFast";

/// Which of this program's tokenizers the files in `folder` describe, for a model with so many ids. Where there are none, a model with as many
/// ids as GPT-2 has is taken for one with its tokenizer; of others nothing is known.
///
/// # Errors
/// [`CheckpointError::Io`]; [`CheckpointError::Foreign`] for files that are damaged; [`CheckpointError::Unsupported`] for another tokenizer.
pub(super) fn identify(folder: &Path, vocab_size: usize) -> Result<Option<Tokenizer>, CheckpointError> {
    let looks_like_gpt2 = (GPT2_VOCABULARY..=GPT2_PADDED).contains(&vocab_size);
    let Some((path, whole)) = [(TOKENIZER, true), (VOCABULARY, false)]
        .into_iter()
        .map(|(name, whole)| (folder.join(name), whole))
        .find(|(path, _)| path.exists())
    else {
        return Ok(looks_like_gpt2.then(Tokenizer::gpt2));
    };
    let foreign = |detail: String| CheckpointError::Foreign { path: path.clone(), detail };
    let value: Value =
        serde_json::from_slice(&read_short(&path)?).map_err(|error| foreign(format!("it is not JSON: {error}")))?;
    let ids = if whole { &value["model"]["vocab"] } else { &value };
    let Some(ids) = ids.as_object() else {
        return Err(foreign("it does not list tokens with their ids".into()));
    };
    let Some(tokens) = in_order(ids) else {
        return Err(foreign("the ids of its tokens are not 0, 1, 2 and so on".into()));
    };
    let known = known(&tokens, value["model"]["type"].as_str());
    match known {
        Some(tokenizer) if tokenizer.vocab_size() <= vocab_size => Ok(Some(tokenizer)),
        Some(tokenizer) => Err(foreign(format!(
            "it has {} tokens, and the model has {vocab_size}, so they do not belong together",
            tokenizer.vocab_size()
        ))),
        None => {
            let detail =
                format!("its tokenizer, of {} tokens, is not one of GPT-2's, bytes or characters", tokens.len());
            Err(CheckpointError::Unsupported { path, detail })
        }
    }
}

/// The tokens in order of their ids, which are to be 0, 1, 2 and so on.
fn in_order(ids: &Map<String, Value>) -> Option<Vec<&str>> {
    let mut tokens: Vec<(usize, &str)> = Vec::with_capacity(ids.len());
    for (token, id) in ids {
        tokens.push((usize::try_from(id.as_u64()?).ok()?, token));
    }
    tokens.sort_unstable();
    tokens
        .iter()
        .enumerate()
        .all(|(index, (id, _))| index == *id)
        .then(|| tokens.iter().map(|(_, token)| *token).collect())
}

/// The tokenizer with these tokens; `model` is the kind of `tokenizer.json` that lists them.
fn known(tokens: &[&str], model: Option<&str>) -> Option<Tokenizer> {
    let names = |token: &str, byte: u8| token == name_of_byte(byte).encode_utf8(&mut [0; 4]);
    if tokens.len() == BYTES && tokens.iter().zip(0..=u8::MAX).all(|(token, byte)| names(token, byte)) {
        return Some(Tokenizer::bytes());
    }
    if tokens.len() == GPT2_VOCABULARY {
        let gpt2 = Tokenizer::gpt2();
        let expected = gpt2_names(&gpt2).into_iter().chain([END_OF_TEXT.to_owned()]);
        return tokens.iter().copied().eq(expected).then_some(gpt2);
    }
    if model == Some("WordLevel") {
        let text: String = tokens.concat();
        let tokenizer = Tokenizer::chars_of(&text).ok()?;
        let same = tokens.iter().copied().eq(text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()]));
        let in_order = tokenizer.vocab_size() == tokens.len() && text.chars().is_sorted();
        return (same && in_order).then_some(tokenizer);
    }
    None
}

/// A `tokenizer.json` of byte-level encoding. GPT-2's cuts a text into words first.
fn byte_level(vocabulary: Value, merges: &[String], words: bool) -> Value {
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": words},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": words},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": words},
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": false,
            "byte_fallback": false,
            "vocab": vocabulary,
            "merges": merges,
        },
    })
}

/// A `tokenizer.json` of characters. One that is not known is an error there, as it is here: the token for it does not exist.
fn characters(tokenizer: &Tokenizer) -> Value {
    let names = (0..tokenizer.vocab_size()).filter_map(|id| tokenizer.decode(&[id as u16]).ok());
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": false},
        "post_processor": null,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary(names), "unk_token": "<unknown>"},
    })
}

/// Tokens with their ids, in order.
fn vocabulary(names: impl Iterator<Item = String>) -> Value {
    Value::Object(names.enumerate().map(|(id, name)| (name, Value::from(id))).collect())
}

/// The character by which byte-level encoding names a byte: itself where it is printable, else the next free one from 256 on.
fn name_of_byte(byte: u8) -> char {
    let is_printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|other| !is_printable(*other)).count() as u32;
    char::from_u32(256 + before).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// GPT-2's tokens in order of their ids, without the end of a document, each as byte-level encoding names its bytes.
fn gpt2_names(tokenizer: &Tokenizer) -> Vec<String> {
    let names: Vec<char> = (0..=u8::MAX).map(name_of_byte).collect();
    gpt2_bytes(tokenizer).iter().map(|bytes| bytes.iter().map(|byte| names[usize::from(*byte)]).collect()).collect()
}

/// The bytes of GPT-2's tokens in order of their ids, without the end of a document.
fn gpt2_bytes(tokenizer: &Tokenizer) -> Vec<Vec<u8>> {
    (0..GPT2_VOCABULARY - 1).map(|id| tokenizer.decode_bytes(&[id as u16]).unwrap_or_default()).collect()
}

/// GPT-2's merges in order. Each token after the single bytes is the merge of the two pieces that its bytes come to by the merges before it.
fn gpt2_merges(tokenizer: &Tokenizer, names: &[String]) -> Vec<String> {
    let tokens = gpt2_bytes(tokenizer);
    let ids: HashMap<&[u8], usize> = tokens.iter().enumerate().map(|(id, bytes)| (bytes.as_slice(), id)).collect();
    let pieces_of = |id: usize| {
        // Where each piece begins, and the end.
        let bytes = tokens[id].as_slice();
        let mut cuts: Vec<usize> = (0..=bytes.len()).collect();
        while cuts.len() > 3 {
            let merged = |at: usize| ids.get(&bytes[cuts[at]..cuts[at + 2]]).copied().filter(|merged| *merged < id);
            let first = (0..cuts.len() - 2).filter_map(|at| Some((merged(at)?, at))).min();
            let Some((_, at)) = first else { break };
            cuts.remove(at + 1);
        }
        cuts
    };
    (BYTES..tokens.len())
        .map(|id| {
            let cuts = pieces_of(id);
            let pieces: Vec<&str> = cuts
                .windows(2)
                .filter_map(|cut| ids.get(&tokens[id][cut[0]..cut[1]]))
                .map(|piece| names[*piece].as_str())
                .collect();
            pieces.join(" ")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_merges_are_gpt2s() {
        let gpt2 = Tokenizer::gpt2();
        let names = gpt2_names(&gpt2);
        let merges = gpt2_merges(&gpt2, &names);
        assert_eq!(merges.len(), 50_000);
        assert!(merges.iter().all(|merge| merge.split(' ').count() == 2));
        // As its published file begins and ends.
        assert_eq!(merges[..6], ["Ġ t", "Ġ a", "h e", "i n", "r e", "o n"]);
        assert_eq!(merges[49_999], "Ġg azed");
        // Each gives the token of its place.
        for (merge, name) in merges.iter().zip(&names[BYTES..]) {
            assert_eq!(merge.replacen(' ', "", 1), *name);
        }
        assert_eq!((names[0].as_str(), names[220].as_str(), names[198].as_str()), ("!", "Ġ", "Ċ"));
    }

    #[test]
    fn what_is_written_is_recognised_and_what_is_changed_is_not() {
        let tokenizers = [Tokenizer::gpt2(), Tokenizer::bytes(), Tokenizer::chars_of("\n \"äb漢").unwrap()];
        for tokenizer in tokenizers {
            let folder = tempfile::tempdir().unwrap();
            let files = files(&tokenizer, 32).unwrap();
            for (name, bytes) in &files {
                std::fs::write(folder.path().join(name), bytes).unwrap();
            }
            let size = tokenizer.vocab_size();
            let found = || identify(folder.path(), size);
            assert_eq!(found().unwrap().unwrap(), tokenizer);
            let error = identify(folder.path(), size - 1).unwrap_err().to_string();
            assert!(error.contains(&size.to_string()), "{error}");
            if tokenizer.kind() == TokenizerKind::Gpt2 {
                std::fs::remove_file(folder.path().join(TOKENIZER)).unwrap();
                assert_eq!(found().unwrap().unwrap(), tokenizer);
                continue;
            }
            // Two tokens changed places.
            let path = folder.path().join(TOKENIZER);
            let mut value: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            let ids = value["model"]["vocab"].as_object_mut().unwrap();
            for id in ids.values_mut() {
                *id = match id.as_u64() {
                    Some(0) => 1.into(),
                    Some(1) => 0.into(),
                    _ => id.clone(),
                };
            }
            std::fs::write(&path, serde_json::to_vec(&value).unwrap()).unwrap();
            let error = found().unwrap_err();
            assert!(matches!(error, CheckpointError::Unsupported { .. }), "{error}");
            std::fs::write(&path, r#"{"model": {"vocab": {"a": 7}}}"#).unwrap();
            let error = found().unwrap_err();
            assert!(matches!(error, CheckpointError::Foreign { .. }), "{error}");
        }
    }

    #[test]
    fn without_files_only_gpt2s_vocabulary_is_known() {
        let folder = tempfile::tempdir().unwrap();
        for size in [GPT2_VOCABULARY, GPT2_PADDED] {
            assert_eq!(identify(folder.path(), size).unwrap(), Some(Tokenizer::gpt2()));
        }
        for size in [1, 256, 50_256, 50_305] {
            assert_eq!(identify(folder.path(), size).unwrap(), None);
        }
    }
}
