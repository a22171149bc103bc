//! Text to token ids and back: GPT-2's byte-pair encoding, raw bytes, or the characters of one corpus.

use std::fmt;

use serde::{Deserialize, Serialize};
use tiktoken_rs::CoreBPE;

/// Number of GPT-2 token ids: 256 bytes, 50,000 merges and `<|endoftext|>` (id 50256).
pub const GPT2_VOCABULARY: usize = 50_257;

/// What GPT-2's tokenizer calls the end of a document.
pub const END_OF_TEXT: &str = "<|endoftext|>";
/// Its id.
const END_OF_TEXT_ID: u16 = 50_256;

/// Which tokenizer; written `gpt2`, `bytes` or `chars`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenizerKind {
    /// GPT-2's byte-pair encoding (`r50k_base`), 50,257 ids.
    #[default]
    Gpt2,
    /// Each byte is its own id, 256 ids; takes any file.
    Bytes,
    /// Each distinct character of the corpus is an id, numbered in order of code point.
    Chars,
}

/// Turns text into token ids below [`vocab_size`](Tokenizer::vocab_size) and back. Serializes as its kind and, for
/// `chars`, the characters, which is all that a checkpoint needs.
#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "Description", into = "Description")]
pub struct Tokenizer {
    inner: Inner,
}

#[derive(Clone)]
enum Inner {
    Gpt2(&'static CoreBPE),
    Bytes,
    /// Strictly ascending, at most 65,536 of them.
    Chars(Vec<char>),
}

/// What can go wrong between text and ids.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenizerError {
    /// Bytes that are not UTF-8, given to a tokenizer that needs text.
    #[error(
        "the text is not UTF-8 at byte {offset}, and the tokenizer `{kind}` needs UTF-8; convert it, or use the tokenizer `bytes`"
    )]
    NotUtf8 {
        /// The tokenizer asked.
        kind: TokenizerKind,
        /// First byte that does not belong to a UTF-8 sequence.
        offset: usize,
    },
    /// A character that the corpus of a `chars` tokenizer did not contain.
    #[error(
        "the character {character:?} at byte {offset} is not one of the {known} of this `chars` tokenizer; leave it out, or train with the \
         tokenizer `gpt2` or `bytes`"
    )]
    UnknownCharacter {
        /// The character.
        character: char,
        /// Where it stands in the text, in bytes.
        offset: usize,
        /// Number of characters that the tokenizer knows.
        known: usize,
    },
    /// An id outside the vocabulary, met while decoding.
    #[error(
        "token id {id} at position {position} is outside the vocabulary of the tokenizer `{kind}` ({vocab} ids); these tokens come from \
         another tokenizer"
    )]
    UnknownId {
        /// The tokenizer asked.
        kind: TokenizerKind,
        /// The id.
        id: u16,
        /// Its place in the tokens.
        position: usize,
        /// Number of ids of the vocabulary.
        vocab: usize,
    },
    /// A corpus with more characters than 16-bit ids.
    #[error(
        "the text has {found} distinct characters, and at most 65536 are possible; use the tokenizer `gpt2` or `bytes`"
    )]
    TooManyCharacters {
        /// Number of distinct characters.
        found: usize,
    },
    /// A stored description that no tokenizer writes.
    #[error("this is not a description of a {kind} tokenizer ({reason}); it was damaged or written by another version")]
    BadDescription {
        /// The kind described.
        kind: TokenizerKind,
        /// What is wrong.
        reason: &'static str,
    },
}

impl Tokenizer {
    /// GPT-2's byte-pair encoding; its table is part of the program.
    #[must_use]
    pub fn gpt2() -> Self {
        Self { inner: Inner::Gpt2(tiktoken_rs::r50k_base_singleton()) }
    }

    /// One id a byte.
    #[must_use]
    pub fn bytes() -> Self {
        Self { inner: Inner::Bytes }
    }

    /// One id for each distinct character of `text`, in order of code point.
    ///
    /// # Errors
    /// [`TokenizerError::TooManyCharacters`] above 65,536 distinct characters.
    pub fn chars_of(text: &str) -> Result<Self, TokenizerError> {
        let chars: Vec<char> = text.chars().collect::<std::collections::BTreeSet<_>>().into_iter().collect();
        if chars.len() > 1 << 16 {
            return Err(TokenizerError::TooManyCharacters { found: chars.len() });
        }
        Ok(Self { inner: Inner::Chars(chars) })
    }

    /// Which of the three this is.
    #[must_use]
    pub fn kind(&self) -> TokenizerKind {
        match self.inner {
            Inner::Gpt2(_) => TokenizerKind::Gpt2,
            Inner::Bytes => TokenizerKind::Bytes,
            Inner::Chars(_) => TokenizerKind::Chars,
        }
    }

    /// Number of ids; every id is below it.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        match &self.inner {
            Inner::Gpt2(_) => GPT2_VOCABULARY,
            Inner::Bytes => 256,
            Inner::Chars(chars) => chars.len(),
        }
    }

    /// The ids of `text`. Names of special tokens (`<|endoftext|>`) are plain text here.
    ///
    /// # Errors
    /// [`TokenizerError::UnknownCharacter`] from a `chars` tokenizer.
    pub fn encode(&self, text: &str) -> Result<Vec<u16>, TokenizerError> {
        match &self.inner {
            Inner::Gpt2(bpe) => Ok(encode_gpt2(bpe, text)),
            Inner::Bytes => Ok(text.bytes().map(u16::from).collect()),
            Inner::Chars(chars) => text
                .char_indices()
                .map(|(offset, character)| {
                    let id = chars.binary_search(&character).map_err(|_| TokenizerError::UnknownCharacter {
                        character,
                        offset,
                        known: chars.len(),
                    })?;
                    Ok(id as u16)
                })
                .collect(),
        }
    }

    /// The ids of `text`, in which [`END_OF_TEXT`] is one id where this tokenizer has one for it; else as [`encode`](Tokenizer::encode).
    ///
    /// # Errors
    /// Those of [`encode`](Tokenizer::encode).
    pub fn encode_documents(&self, text: &str) -> Result<Vec<u16>, TokenizerError> {
        let Some(end) = self.end_of_text() else { return self.encode(text) };
        let mut ids = Vec::with_capacity(text.len() / 3);
        for (index, document) in text.split(END_OF_TEXT).enumerate() {
            if index > 0 {
                ids.push(end);
            }
            ids.extend(self.encode(document)?);
        }
        Ok(ids)
    }

    /// The id that ends a document: GPT-2's 50256, which the other tokenizers have not.
    #[must_use]
    pub fn end_of_text(&self) -> Option<u16> {
        matches!(self.inner, Inner::Gpt2(_)).then_some(END_OF_TEXT_ID)
    }

    /// A text to start from where there is none: a line end, else a blank, else the first character that this tokenizer knows.
    #[must_use]
    pub fn first_text(&self) -> String {
        match &self.inner {
            Inner::Gpt2(_) | Inner::Bytes => '\n'.into(),
            Inner::Chars(chars) => {
                let known = ['\n', ' '].into_iter().find(|character| chars.binary_search(character).is_ok());
                known.or_else(|| chars.first().copied()).into_iter().collect()
            }
        }
    }

    /// The ids of `bytes`, which must be UTF-8 unless this is the `bytes` tokenizer.
    ///
    /// # Errors
    /// [`TokenizerError::NotUtf8`], and those of [`encode`](Tokenizer::encode).
    pub fn encode_bytes(&self, bytes: &[u8]) -> Result<Vec<u16>, TokenizerError> {
        if let Inner::Bytes = self.inner {
            return Ok(bytes.iter().copied().map(u16::from).collect());
        }
        let text = std::str::from_utf8(bytes)
            .map_err(|error| TokenizerError::NotUtf8 { kind: self.kind(), offset: error.valid_up_to() })?;
        self.encode(text)
    }

    /// The text of `ids`, with U+FFFD where their bytes are not UTF-8 (a byte-pair token may end inside a character).
    ///
    /// # Errors
    /// [`TokenizerError::UnknownId`].
    pub fn decode(&self, ids: &[u16]) -> Result<String, TokenizerError> {
        let bytes = self.decode_bytes(ids)?;
        Ok(String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
    }

    /// The exact bytes of `ids`, for text that is put out token by token.
    ///
    /// # Errors
    /// [`TokenizerError::UnknownId`].
    pub fn decode_bytes(&self, ids: &[u16]) -> Result<Vec<u8>, TokenizerError> {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for (position, &id) in ids.iter().enumerate() {
            let unknown = || TokenizerError::UnknownId { kind: self.kind(), id, position, vocab: self.vocab_size() };
            match &self.inner {
                Inner::Gpt2(bpe) => bytes.extend(bpe.decode_bytes(&[u32::from(id)]).map_err(|_| unknown())?),
                Inner::Bytes => bytes.push(u8::try_from(id).map_err(|_| unknown())?),
                Inner::Chars(chars) => {
                    let character = chars.get(usize::from(id)).ok_or_else(unknown)?;
                    bytes.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
                }
            }
        }
        Ok(bytes)
    }
}

impl TokenizerError {
    /// The same of a text that begins `bytes` further back.
    pub(crate) fn moved_by(self, bytes: usize) -> Self {
        match self {
            Self::UnknownCharacter { character, offset, known } => {
                Self::UnknownCharacter { character, offset: offset + bytes, known }
            }
            Self::NotUtf8 { kind, offset } => Self::NotUtf8 { kind, offset: offset + bytes },
            other => other,
        }
    }
}

impl PartialEq for Tokenizer {
    fn eq(&self, other: &Self) -> bool {
        match (&self.inner, &other.inner) {
            (Inner::Chars(mine), Inner::Chars(theirs)) => mine == theirs,
            _ => self.kind() == other.kind(),
        }
    }
}

impl Eq for Tokenizer {}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tokenizer({}, {} ids)", self.kind(), self.vocab_size())
    }
}

comm_core::names!(pub TokenizerKind, "tokenizer": Gpt2 = "gpt2", Bytes = "bytes", Chars = "chars");

/// The ids of `text`, cut before the last character of each very long run of white space.
///
/// The pattern that splits text into words backtracks over a run of white space that is followed by something else, and
/// the regular expression engine gives up (and `encode_ordinary` panics) at about a million characters. The cut changes
/// no id: in the whole text the pattern takes all but the last character of such a run as one piece, as it does at the
/// end of a text, and it goes on from there without looking back.
fn encode_gpt2(bpe: &CoreBPE, text: &str) -> Vec<u16> {
    let mut ids = Vec::with_capacity(text.len() / 3);
    // Ordinary ids end at 50,255, so each fits.
    let mut push = |part: &str| ids.extend(bpe.encode_ordinary(part).into_iter().map(|id| id as u16));
    let (mut from, mut run, mut last) = (0, 0, 0);
    for (offset, character) in text.char_indices() {
        if character.is_whitespace() {
            run += 1;
            last = offset;
        } else {
            if run > LONGEST_RUN {
                push(&text[from..last]);
                from = last;
            }
            run = 0;
        }
    }
    push(&text[from..]);
    ids
}

/// Characters of white space in a row that the pattern may see.
const LONGEST_RUN: usize = 100_000;

/// The serialized form of a [`Tokenizer`].
#[derive(Serialize, Deserialize)]
struct Description {
    kind: TokenizerKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    chars: Option<String>,
}

impl From<Tokenizer> for Description {
    fn from(tokenizer: Tokenizer) -> Self {
        let kind = tokenizer.kind();
        let chars = match tokenizer.inner {
            Inner::Chars(chars) => Some(chars.into_iter().collect()),
            Inner::Gpt2(_) | Inner::Bytes => None,
        };
        Self { kind, chars }
    }
}

impl TryFrom<Description> for Tokenizer {
    type Error = TokenizerError;

    fn try_from(description: Description) -> Result<Self, Self::Error> {
        let kind = description.kind;
        let bad = |reason| TokenizerError::BadDescription { kind, reason };
        match (kind, description.chars) {
            (TokenizerKind::Gpt2, None) => Ok(Self::gpt2()),
            (TokenizerKind::Bytes, None) => Ok(Self::bytes()),
            (TokenizerKind::Chars, Some(chars)) => {
                let tokenizer = Self::chars_of(&chars)?;
                if tokenizer.vocab_size() == 0 {
                    return Err(bad("it lists no characters"));
                }
                match &tokenizer.inner {
                    Inner::Chars(sorted) if chars.chars().eq(sorted.iter().copied()) => Ok(tokenizer),
                    _ => Err(bad("its characters are not in ascending order")),
                }
            }
            (TokenizerKind::Chars, None) => Err(bad("its characters are missing")),
            (TokenizerKind::Gpt2 | TokenizerKind::Bytes, Some(_)) => Err(bad("it lists characters")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpt2_ids_are_the_published_ones() {
        let gpt2 = Tokenizer::gpt2();
        assert_eq!(gpt2.vocab_size(), 50_257);
        assert_eq!(gpt2.encode("Hello world").unwrap(), [15_496, 995]);
        assert!(gpt2.encode("").unwrap().is_empty());
        assert_eq!(gpt2.decode(&[15_496, 995]).unwrap(), "Hello world");
        assert_eq!(gpt2.decode(&[50_256]).unwrap(), "<|endoftext|>");
        assert!(gpt2.encode("<|endoftext|>").unwrap().len() > 1, "the name of a special token is plain text");
    }

    #[test]
    fn the_end_of_a_document_is_one_id_for_gpt2_alone() {
        let gpt2 = Tokenizer::gpt2();
        let text = format!("Hello world{END_OF_TEXT}\n{END_OF_TEXT}{END_OF_TEXT} Hello");
        assert_eq!(gpt2.encode_documents(&text).unwrap(), [15_496, 995, 50_256, 198, 50_256, 50_256, 18_435]);
        assert_eq!(gpt2.encode_documents(&END_OF_TEXT.repeat(5_000)).unwrap(), [50_256; 5_000]);
        assert_eq!(gpt2.encode_documents("<|endoftext |>").unwrap(), gpt2.encode("<|endoftext |>").unwrap());
        // What tiktoken gives where it allows the token.
        let table = tiktoken_rs::r50k_base_singleton();
        for text in [text.as_str(), "  <|endoftext|>  x<|endoftext", "<|<|endoftext|>|>", "a\n\n<|endoftext|>\n\nb", ""]
        {
            let whole: Vec<u16> = table.encode_with_special_tokens(text).into_iter().map(|id| id as u16).collect();
            assert_eq!(gpt2.encode_documents(text).unwrap(), whole, "{text:?}");
        }
        for other in [Tokenizer::bytes(), Tokenizer::chars_of(&text).unwrap()] {
            assert_eq!(other.end_of_text(), None);
            assert_eq!(other.encode_documents(&text).unwrap(), other.encode(&text).unwrap());
        }
    }

    #[test]
    fn there_is_always_a_text_to_start_from() {
        for (text, first) in [("b\na ", "\n"), ("b a", " "), ("cba", "a"), ("漢", "漢")] {
            let tokenizer = Tokenizer::chars_of(text).unwrap();
            assert_eq!(tokenizer.first_text(), first);
            assert_eq!(tokenizer.encode(first).unwrap().len(), 1);
        }
        assert_eq!(Tokenizer::bytes().first_text(), "\n");
    }

    #[test]
    fn every_gpt2_id_decodes_and_the_first_one_past_them_does_not() {
        let gpt2 = Tokenizer::gpt2();
        for id in 0..50_257_u16 {
            assert!(!gpt2.decode_bytes(&[id]).unwrap().is_empty(), "id {id}");
        }
        let error = gpt2.decode(&[0, 50_257]).unwrap_err();
        assert_eq!(
            error,
            TokenizerError::UnknownId { kind: TokenizerKind::Gpt2, id: 50_257, position: 1, vocab: 50_257 }
        );
    }

    #[test]
    fn text_comes_back_from_every_tokenizer() {
        let text = "Straße, 東京 and \u{1f980}!\r\n\ttabs  and  spaces\u{0}";
        for tokenizer in [Tokenizer::gpt2(), Tokenizer::bytes(), Tokenizer::chars_of(text).unwrap()] {
            let ids = tokenizer.encode(text).unwrap();
            assert_eq!(tokenizer.encode_bytes(text.as_bytes()).unwrap(), ids);
            assert!(ids.iter().all(|&id| usize::from(id) < tokenizer.vocab_size()));
            assert_eq!(tokenizer.decode(&ids).unwrap(), text, "{tokenizer:?}");
        }
    }

    #[test]
    fn a_run_of_a_million_blanks_or_letters_is_encoded() {
        let gpt2 = Tokenizer::gpt2();
        let texts = ["a".to_owned() + &" ".repeat(1_100_000) + "word", "\n".repeat(1_100_000), "z".repeat(1_100_000)];
        for text in texts {
            assert_eq!(gpt2.decode(&gpt2.encode(&text).unwrap()).unwrap(), text);
        }
    }

    #[test]
    fn cutting_a_run_of_blanks_changes_no_id() {
        let gpt2 = Tokenizer::gpt2();
        for (blank, next) in
            [(" ", "word"), ("\n", "word"), (" \n", "(x"), ("\u{3000}", "7"), ("\t", "\u{1f980}"), (" ", "")]
        {
            let run = blank.repeat(LONGEST_RUN + 3);
            let text = format!("before{run}{next} after{run}\u{e9}");
            let whole: Vec<u16> =
                tiktoken_rs::r50k_base_singleton().encode_ordinary(&text).into_iter().map(|id| id as u16).collect();
            assert!(gpt2.encode(&text).unwrap() == whole, "{blank:?} before {next:?}");
        }
    }

    #[test]
    fn half_a_character_decodes_to_the_replacement_character() {
        let bytes = Tokenizer::bytes();
        assert_eq!(bytes.decode(&[0x41, 0xc3]).unwrap(), "A\u{fffd}");
        assert_eq!(bytes.decode_bytes(&[0x41, 0xc3]).unwrap(), [0x41, 0xc3]);
        assert!(matches!(bytes.decode(&[256]), Err(TokenizerError::UnknownId { id: 256, vocab: 256, .. })));
    }

    #[test]
    fn bytes_that_are_not_text_need_the_bytes_tokenizer() {
        let raw = [b'a', b'b', 0xff, b'c'];
        assert_eq!(Tokenizer::bytes().encode_bytes(&raw).unwrap(), [97, 98, 255, 99]);
        let error = Tokenizer::gpt2().encode_bytes(&raw).unwrap_err();
        assert_eq!(error, TokenizerError::NotUtf8 { kind: TokenizerKind::Gpt2, offset: 2 });
        assert!(error.to_string().contains("tokenizer `bytes`"), "{error}");
    }

    #[test]
    fn characters_are_numbered_in_order_and_strangers_are_named() {
        let chars = Tokenizer::chars_of("hello").unwrap();
        assert_eq!(chars.vocab_size(), 4);
        assert_eq!(chars.encode("hello").unwrap(), [1, 0, 2, 2, 3]);
        assert_eq!(
            chars.encode("heß").unwrap_err(),
            TokenizerError::UnknownCharacter { character: 'ß', offset: 2, known: 4 }
        );
        assert!(matches!(chars.decode(&[4]), Err(TokenizerError::UnknownId { id: 4, vocab: 4, .. })));
        let many: String = (0..=0x11_000).filter_map(char::from_u32).collect();
        assert!(matches!(Tokenizer::chars_of(&many), Err(TokenizerError::TooManyCharacters { .. })));
    }

    #[test]
    fn the_description_round_trips_and_a_damaged_one_is_refused() {
        for tokenizer in [Tokenizer::gpt2(), Tokenizer::bytes(), Tokenizer::chars_of("\n \"äb").unwrap()] {
            let json = serde_json::to_string(&tokenizer).unwrap();
            assert_eq!(serde_json::from_str::<Tokenizer>(&json).unwrap(), tokenizer, "{json}");
        }
        assert_eq!(serde_json::to_string(&Tokenizer::gpt2()).unwrap(), r#"{"kind":"gpt2"}"#);
        for bad in [
            r#"{"kind":"chars"}"#,
            r#"{"kind":"chars","chars":""}"#,
            r#"{"kind":"chars","chars":"ba"}"#,
            r#"{"kind":"chars","chars":"aa"}"#,
            r#"{"kind":"bytes","chars":"a"}"#,
            r#"{"kind":"words"}"#,
        ] {
            assert!(serde_json::from_str::<Tokenizer>(bad).is_err(), "{bad}");
        }
        assert_ne!(Tokenizer::chars_of("ab").unwrap(), Tokenizer::chars_of("ac").unwrap());
        assert_ne!(Tokenizer::bytes(), Tokenizer::gpt2());
    }

    #[test]
    fn kinds_are_written_as_they_are_read() {
        for kind in [TokenizerKind::Gpt2, TokenizerKind::Bytes, TokenizerKind::Chars] {
            assert_eq!(kind.to_string().parse::<TokenizerKind>().unwrap(), kind);
        }
        let error = "GPT-2".parse::<TokenizerKind>().unwrap_err();
        assert_eq!(error.to_string(), "unknown tokenizer 'GPT-2', expected one of gpt2, bytes, chars");
    }
}
