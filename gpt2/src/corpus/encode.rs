//! A text's ids, made on all cores.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use crate::tokenizer::{END_OF_TEXT, Tokenizer, TokenizerError};

/// Bytes of text that a thread takes at a time, about: a twentieth of a second's work.
const CHUNK: usize = 256 << 10;

/// The ids of `text`, the same for any number of threads; `base` is where the text stands in the whole one, for messages, and `done` hears
/// how many bytes more have been encoded. With `documents` the mark between documents is one id where the tokenizer has one.
pub(super) fn encode(
    tokenizer: &Tokenizer,
    text: &str,
    base: usize,
    documents: bool,
    done: &mut dyn FnMut(usize),
) -> Result<Vec<u16>, TokenizerError> {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    encode_by(tokenizer, text, base, documents, (threads, CHUNK), done)
}

fn encode_by(
    tokenizer: &Tokenizer,
    text: &str,
    base: usize,
    documents: bool,
    (threads, chunk): (usize, usize),
    done: &mut dyn FnMut(usize),
) -> Result<Vec<u16>, TokenizerError> {
    let chunks = chunks(text, chunk);
    let one = |index: usize| {
        let (from, part) = chunks[index];
        let ids = if documents { tokenizer.encode_documents(part) } else { tokenizer.encode(part) };
        ids.map_err(|error| error.moved_by(base + from))
    };
    let next = AtomicUsize::new(0);
    let work = |results: &mpsc::Sender<(usize, Result<Vec<u16>, TokenizerError>)>| {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= chunks.len() {
                break;
            }
            let result = one(index);
            if result.is_err() {
                // Chunks are taken in order, so the first error of the text is among those already taken.
                next.store(chunks.len(), Ordering::Relaxed);
            }
            if results.send((index, result)).is_err() {
                break;
            }
        }
    };
    let mut encoded: Vec<Option<Result<Vec<u16>, TokenizerError>>> = chunks.iter().map(|_| None).collect();
    thread::scope(|scope| {
        let (send, results) = mpsc::channel();
        let mut workers = 0;
        for _ in 0..threads.min(chunks.len()).max(1) {
            let (send, work) = (send.clone(), &work);
            if chunks.len() > 1 && thread::Builder::new().spawn_scoped(scope, move || work(&send)).is_ok() {
                workers += 1;
            }
        }
        if workers == 0 {
            work(&send);
        }
        drop(send);
        for (index, result) in results {
            done(chunks[index].1.len());
            encoded[index] = Some(result);
        }
    });
    let mut ids = Vec::with_capacity(encoded.iter().flatten().flatten().map(Vec::len).sum());
    for part in encoded.into_iter().flatten() {
        ids.extend(part?);
    }
    Ok(ids)
}

/// Cuts `text` into parts of at least `size` bytes, each with its place, such that no tokenizer's ids depend on the cuts.
///
/// A cut lies between a character that is no white space and white space, or behind a letter or a digit before something of another kind. Every
/// alternative of the pattern by which GPT-2 splits text into words takes white space at its beginning or alone, never behind something else, and
/// letters or digits to the end of their run; the pattern looks ahead from white space only, and never back. So a word ends at each such
/// place, whatever comes before or after. No cut lies within the mark between documents.
fn chunks(text: &str, size: usize) -> Vec<(usize, &str)> {
    let mut chunks = Vec::with_capacity(text.len() / size.max(1) + 1);
    let mut from = 0;
    while from < text.len() {
        let to = cut_after(text, from.saturating_add(size.max(1)));
        chunks.push((from, &text[from..to]));
        from = to;
    }
    chunks
}

/// The first place for a cut from `at` bytes on, else the end.
pub(super) fn cut_after(text: &str, at: usize) -> usize {
    let at = (at..text.len()).find(|&at| text.is_char_boundary(at)).unwrap_or(text.len());
    let mut before = text[..at].chars().next_back();
    for (offset, next) in text[at..].char_indices() {
        let before = before.replace(next);
        if before.is_some_and(|before| ends_word(before, next)) && !is_within_mark(text, at + offset) {
            return at + offset;
        }
    }
    text.len()
}

/// Whether a word ends between these characters, wherever they stand.
fn ends_word(before: char, next: char) -> bool {
    match (Class::of(before), Class::of(next)) {
        (Some(Class::White), _) => false,
        (_, Some(Class::White)) => true,
        (Some(before @ (Class::Letter | Class::Number)), Some(next)) => before != next,
        _ => false,
    }
}

/// What the pattern tells apart.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    White,
    Letter,
    Number,
    Sign,
}

impl Class {
    /// That of white space, of ASCII, and of the letters and signs of which languages have most that write without white space; `None` where
    /// it takes Unicode's tables to tell.
    fn of(character: char) -> Option<Self> {
        match character {
            _ if character.is_whitespace() => Some(Class::White),
            'A'..='Z' | 'a'..='z' => Some(Class::Letter),
            '0'..='9' => Some(Class::Number),
            _ if character.is_ascii_punctuation() => Some(Class::Sign),
            // Hiragana, katakana, Han, Hangul.
            '\u{3041}'..='\u{3096}'
            | '\u{30a1}'..='\u{30fa}'
            | '\u{3400}'..='\u{4dbf}'
            | '\u{4e00}'..='\u{9fef}'
            | '\u{ac00}'..='\u{d7a3}' => Some(Class::Letter),
            // Their commas, full stops and brackets.
            '\u{3001}' | '\u{3002}' | '\u{3008}'..='\u{3011}' | '\u{ff01}'..='\u{ff0f}' | '\u{ff1a}'..='\u{ff20}' => {
                Some(Class::Sign)
            }
            _ => None,
        }
    }
}

/// Whether the place lies inside a mark between documents.
fn is_within_mark(text: &str, at: usize) -> bool {
    (1..END_OF_TEXT.len()).any(|length| {
        let (beginning, rest) = END_OF_TEXT.split_at(length);
        text[..at].ends_with(beginning) && text[at..].starts_with(rest)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use comm_core::splitmix::SplitMix64;

    /// Text of pieces that the pattern treats in different ways.
    fn text(seed: u64, pieces: u64) -> String {
        const PIECES: [&str; 48] = [
            // White space of all kinds, and what some languages count as such.
            " ",
            "  ",
            "\n",
            "\n\n",
            "\t",
            "\r\n",
            "\x0b",
            "\x0c",
            "\u{85}",
            "\u{a0}",
            "\u{1680}",
            "\u{2003}",
            "\u{2028}",
            "\u{2029}",
            "\u{202f}",
            "\u{205f}",
            "\u{3000}",
            "\x1c",
            "\x1f",
            "\u{200b}",
            "\u{180e}",
            "\u{feff}",
            // Letters, numbers and the rest.
            "a",
            "word",
            "'s",
            "'ll",
            "'",
            "12",
            "³",
            "!?",
            "漢字",
            "\u{301}",
            "\u{1f980}",
            "<|endoftext|>",
            // Without white space between words.
            "かな",
            "カナ",
            "ー",
            "한글",
            "。",
            "、",
            "「漢",
            "！",
            "ｗ",
            "\u{ff11}",
            "ไทย",
            "\u{e35}",
            "x=1;",
            "don't",
        ];
        let mut random = SplitMix64::new(seed);
        (0..pieces).map(|_| PIECES[random.below(PIECES.len() as u64) as usize]).collect()
    }

    #[test]
    fn ids_do_not_depend_on_chunks_or_threads() {
        for seed in 0..150 {
            let text = text(seed, 120);
            let tokenizers = [Tokenizer::gpt2(), Tokenizer::bytes(), Tokenizer::chars_of(&text).unwrap()];
            for tokenizer in tokenizers {
                for documents in [false, true] {
                    let whole = if documents { tokenizer.encode_documents(&text) } else { tokenizer.encode(&text) };
                    for shape in [(1, 1), (2, 1), (3, 7), (2, 100), (4, 1 << 20)] {
                        let mut bytes = 0;
                        let ids = encode_by(&tokenizer, &text, 0, documents, shape, &mut |more| bytes += more);
                        assert_eq!(ids, whole, "{tokenizer:?}, documents {documents}, {shape:?}: {text:?}");
                        assert_eq!(bytes, text.len());
                    }
                }
            }
        }
    }

    #[test]
    fn the_first_unknown_character_is_named_with_its_place_in_the_whole_text() {
        let tokenizer = Tokenizer::chars_of("ab \n").unwrap();
        let text = "ab ab\n".repeat(50) + "x ab y" + &" ab".repeat(50);
        for shape in [(1, 8), (3, 8), (2, 1 << 20)] {
            let error = encode_by(&tokenizer, &text, 1_000, false, shape, &mut |_| ()).unwrap_err();
            let expected = TokenizerError::UnknownCharacter { character: 'x', offset: 1_300, known: 4 };
            assert_eq!(error, expected, "{shape:?}");
        }
    }

    #[test]
    fn words_end_where_kinds_of_characters_meet() {
        assert_eq!(chunks("漢字。かな", 4), [(0, "漢字"), (6, "。かな")]);
        assert_eq!(chunks("abc12--x'll!", 1), [(0, "abc"), (3, "12"), (5, "--x"), (8, "'ll"), (11, "!")]);
        // Not before a mark's end, and not where it takes tables to tell.
        assert_eq!(chunks("<|endoftext|>a", 1), [(0, "<|endoftext|>a")]);
        assert_eq!(chunks("a\u{301}b³c", 1).len(), 1);
    }

    #[test]
    fn text_without_a_place_for_a_cut_is_one_chunk() {
        assert!(chunks("", 4).is_empty());
        assert_eq!(chunks("漢字漢字漢字", 4).len(), 1);
        assert_eq!(chunks("   \n\n   ", 2).len(), 1);
        assert_eq!(chunks("ab cd  ef", 1), [(0, "ab"), (2, " cd"), (5, "  ef")]);
    }
}
