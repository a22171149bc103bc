//! Reading documents a block at a time, as one text.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, Visitor};

use super::{Format, LONGEST, Piece, PrepareError};
use crate::corpus::{CorpusError, formats};
use crate::sys::MappedFile;
use crate::tokenizer::END_OF_TEXT;

/// Bytes that are read at a time.
const BLOCK: usize = 1 << 20;

/// Who takes the text.
pub(super) type Sink<'a> = dyn FnMut(Piece<'_>) -> Result<(), Fault> + 'a;

/// What ends the reading of a file.
#[derive(Debug)]
pub(super) enum Fault {
    /// [`LONGEST`] bytes without a place where the text could be cut; the reader knows where.
    Uncut,
    Error(PrepareError),
}

impl Fault {
    fn at(self, path: &Path, (unit, number): (&'static str, u64)) -> PrepareError {
        match self {
            Fault::Uncut => PrepareError::Line {
                path: path.to_owned(),
                unit,
                number,
                what: format!(
                    "more than {} MiB without a space or another end of a word, which cannot be encoded; is this text?",
                    LONGEST >> 20
                ),
            },
            Fault::Error(error) => error,
        }
    }
}

impl From<PrepareError> for Fault {
    fn from(error: PrepareError) -> Self {
        Fault::Error(error)
    }
}

impl From<CorpusError> for Fault {
    fn from(error: CorpusError) -> Self {
        Fault::Error(error.into())
    }
}

/// All documents of some files, as often as need be.
pub(super) struct Reader<'a> {
    pub(super) files: &'a [(PathBuf, Format)],
    pub(super) field: &'a str,
    pub(super) documents: bool,
}

impl Reader<'_> {
    /// Hands the text to `sink`; `done` hears how many bytes of the files have been read.
    pub(super) fn read(&self, sink: &mut Sink<'_>, done: &mut dyn FnMut(u64)) -> Result<(), PrepareError> {
        let mut joiner = Joiner::new(self.documents, sink);
        let mut before = 0;
        let mut last = (Path::new(""), ("line", 0));
        for (path, format) in self.files {
            let unit = if *format == Format::Parquet { "row" } else { "line" };
            let mut place = Place { path, unit, line: 0, read: 0, next: 0, done: &mut |read| done(before + read) };
            let read = match format {
                Format::Text => place.text(&mut joiner),
                Format::JsonLines => place.json_lines(self.field, &mut joiner),
                #[cfg(feature = "parquet")]
                Format::Parquet => place.parquet(self.field, &mut joiner),
                #[cfg(not(feature = "parquet"))]
                Format::Parquet => Err(PrepareError::NoParquet { path: path.clone() }.into()),
            };
            last = (path, (unit, place.line));
            read.map_err(|fault| fault.at(last.0, last.1))?;
            before += path.metadata().map_or(0, |metadata| metadata.len());
        }
        joiner.end_document().map_err(|fault| fault.at(last.0, last.1))
    }
}

/// How far a file has been read.
pub(super) struct Place<'a> {
    pub(super) path: &'a Path,
    /// What is counted: lines, or rows.
    unit: &'static str,
    /// Which one, from 1.
    pub(super) line: u64,
    read: u64,
    /// Bytes after which the next sign of life is due.
    next: u64,
    done: &'a mut dyn FnMut(u64),
}

impl Place<'_> {
    pub(super) fn advance(&mut self, bytes: u64) {
        self.read += bytes;
        if self.read >= self.next {
            self.next = self.read + BLOCK as u64;
            (self.done)(self.read);
        }
    }

    pub(super) fn wrong(&self, what: impl Into<String>) -> Fault {
        PrepareError::Line { path: self.path.to_owned(), unit: self.unit, number: self.line, what: what.into() }.into()
    }

    pub(super) fn unreadable(&self, source: io::Error) -> Fault {
        CorpusError::Read { path: self.path.to_owned(), source }.into()
    }

    pub(super) fn open(&self) -> Result<File, Fault> {
        File::open(self.path).map_err(|source| self.unreadable(source))
    }

    /// Refuses a file that looks like another format, by what `look` finds.
    fn refuse(
        &self,
        file: &File,
        wanted: &'static str,
        look: fn(&[u8]) -> Option<formats::Format>,
    ) -> Result<(), Fault> {
        let map = MappedFile::of(file).map_err(|source| self.unreadable(source))?;
        match look(map.bytes()) {
            Some(format) => Err(CorpusError::other_format(self.path.to_owned(), format, wanted).into()),
            None => Ok(()),
        }
    }

    fn text(&mut self, joiner: &mut Joiner<'_, '_>) -> Result<(), Fault> {
        let mut file = self.open()?;
        self.refuse(&file, "text", formats::not_text)?;
        joiner.end_document()?;
        self.line = 1;
        let (mut bytes, mut text) = (Vec::with_capacity(BLOCK + 4), String::new());
        loop {
            let block = Read::by_ref(&mut file).take(BLOCK as u64).read_to_end(&mut bytes);
            let is_end = block.map_err(|source| self.unreadable(source))? == 0;
            let valid = match std::str::from_utf8(&bytes) {
                Ok(all) => all,
                // The rest of the character is in the next block.
                Err(error) if error.error_len().is_none() && !is_end => {
                    std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or_default()
                }
                Err(error) => {
                    self.line += lines(&bytes[..error.valid_up_to()]);
                    return Err(self.wrong("the text is not UTF-8; convert it (iconv)"));
                }
            };
            text.push_str(valid);
            joiner.text_with_marks(&mut text, is_end)?;
            let (length, lines) = (valid.len(), lines(valid.as_bytes()));
            self.line += lines;
            self.advance(length as u64);
            bytes.drain(..length);
            if is_end {
                return Ok(());
            }
        }
    }

    fn json_lines(&mut self, field: &str, joiner: &mut Joiner<'_, '_>) -> Result<(), Fault> {
        let file = self.open()?;
        self.refuse(&file, "JSON lines", formats::known)?;
        let mut reader = BufReader::with_capacity(BLOCK, file);
        let mut bytes = Vec::new();
        loop {
            bytes.clear();
            let line = Read::by_ref(&mut reader).take(LONGEST as u64 + 1).read_until(b'\n', &mut bytes);
            let read = line.map_err(|source| self.unreadable(source))?;
            if read == 0 {
                return Ok(());
            }
            self.line += 1;
            if read > LONGEST {
                return Err(self
                    .wrong(format!("a line has more than {} MiB; each line must be one JSON object", LONGEST >> 20)));
            }
            let line = bytes.trim_ascii();
            let line = if self.line == 1 { line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line) } else { line };
            if !line.is_empty() {
                let value = string_in(line, field).map_err(|what| self.wrong(what))?;
                joiner.end_document()?;
                joiner.text(&value)?;
            }
            self.advance(read as u64);
        }
    }
}

fn lines(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|byte| **byte == b'\n').count() as u64
}

/// The string at `field` of a JSON object, or what is wrong.
fn string_in(object: &[u8], field: &str) -> Result<String, String> {
    let mut json = serde_json::Deserializer::from_slice(object);
    let value = Field(field).deserialize(&mut json).and_then(|value| json.end().map(|()| value));
    value.map_err(|error| {
        let all = error.to_string();
        // The line is that of the file.
        let what = all.strip_suffix(&format!(" at line {} column {}", error.line(), error.column())).unwrap_or(&all);
        match object.first() {
            Some(b'{') => format!("{what}, at column {}", error.column()),
            Some(b'[') => {
                "it is a JSON array, and each line must be one JSON object; `jq -c '.[]'` makes lines of an array"
                    .into()
            }
            _ => format!("not a JSON object, which each line must be ({what})"),
        }
    })
}

/// Finds the string at a field of an object, without keeping the others.
struct Field<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for Field<'_> {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Field<'_> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<String, A::Error> {
        let mut found = None;
        while let Some(is_it) = map.next_key_seed(Is(self.0))? {
            if is_it {
                found = Some(map.next_value()?);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        found.ok_or_else(|| {
            A::Error::custom(format_args!("no field '{}'; name the field of the text with --field", self.0))
        })
    }
}

/// Whether a key is this one.
struct Is<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for Is<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Is<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<bool, E> {
        Ok(key == self.0)
    }
}

/// Puts between documents what belongs there, as [`read_joined`](crate::corpus::text::read_joined) does for files: the mark of an end, unless
/// one already stands at the end of the one document or the beginning of the other, or else a line end where there is none.
pub(super) struct Joiner<'a, 'b> {
    documents: bool,
    sink: &'a mut Sink<'b>,
    /// Whether there is no text yet.
    is_empty: bool,
    /// Whether nothing but white space has come since the last mark.
    is_after_mark: bool,
    /// Whether the text so far ends with a line end.
    ends_line: bool,
    /// White space at the beginning of the document, as long as that has nothing else.
    leading: Option<String>,
}

impl<'a, 'b> Joiner<'a, 'b> {
    fn new(documents: bool, sink: &'a mut Sink<'b>) -> Self {
        Joiner { documents, sink, is_empty: true, is_after_mark: false, ends_line: false, leading: None }
    }

    /// The document so far is over, if there is one, and another begins.
    pub(super) fn end_document(&mut self) -> Result<(), Fault> {
        match self.leading.replace(String::new()) {
            Some(leading) if !leading.is_empty() => {
                self.separate()?;
                self.emit(&leading)
            }
            _ => Ok(()),
        }
    }

    /// More of the document, in which marks are text.
    pub(super) fn text(&mut self, text: &str) -> Result<(), Fault> {
        if text.is_empty() {
            return Ok(());
        }
        let Some(mut leading) = self.leading.take() else { return self.emit(text) };
        if text.trim_ascii().is_empty() {
            leading.push_str(text);
            self.leading = Some(leading);
            let is_long = self.leading.as_ref().is_some_and(|leading| leading.len() > LONGEST);
            return if is_long { Err(Fault::Uncut) } else { Ok(()) };
        }
        self.separate()?;
        self.emit(&leading)?;
        self.emit(text)
    }

    /// As [`text`](Self::text) with marks taken for marks, where documents are told apart. What may be the beginning of one stays in `text`.
    fn text_with_marks(&mut self, text: &mut String, is_end: bool) -> Result<(), Fault> {
        if !self.documents {
            self.text(text)?;
            text.clear();
            return Ok(());
        }
        let mut from = 0;
        while let Some(at) = text[from..].find(END_OF_TEXT) {
            self.text(&text[from..from + at])?;
            self.mark()?;
            from += at + END_OF_TEXT.len();
        }
        let rest = &text[from..];
        let begun = (1..END_OF_TEXT.len()).rev().find(|&length| rest.ends_with(&END_OF_TEXT[..length]));
        let stays = begun.filter(|_| !is_end).unwrap_or(0);
        let to = text.len() - stays;
        self.text(&text[from..to])?;
        text.drain(..to);
        Ok(())
    }

    fn mark(&mut self) -> Result<(), Fault> {
        // At the beginning of a document it is what ends the one before.
        if let Some(leading) = self.leading.take() {
            self.emit(&leading)?;
        }
        self.emit_mark()
    }

    /// What belongs before a document that is about to begin.
    fn separate(&mut self) -> Result<(), Fault> {
        match (self.is_empty, self.documents) {
            (false, true) if !self.is_after_mark => self.emit_mark(),
            (false, false) if !self.ends_line => self.emit("\n"),
            _ => Ok(()),
        }
    }

    fn emit_mark(&mut self) -> Result<(), Fault> {
        (self.is_empty, self.is_after_mark, self.ends_line) = (false, true, false);
        (self.sink)(Piece::Mark)
    }

    fn emit(&mut self, text: &str) -> Result<(), Fault> {
        if text.is_empty() {
            return Ok(());
        }
        self.is_empty = false;
        self.is_after_mark &= text.trim_ascii().is_empty();
        self.ends_line = text.ends_with('\n');
        (self.sink)(Piece::Text(text))
    }
}
