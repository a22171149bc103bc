//! Text files: finding them in a fixed order and reading them as one text.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::{self, ErrorKind, Read},
    path::{Path, PathBuf},
};

use super::{CorpusError, formats};
use crate::tokenizer::{END_OF_TEXT, TokenizerError, TokenizerKind};

/// The files below `folder` whose extension, in any case, is one of `extensions`, in order of path. Names that begin
/// with a dot and links to folders are passed over.
pub(super) fn files_below(folder: &Path, extensions: &[&str]) -> Result<Vec<PathBuf>, CorpusError> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        let read = |source| CorpusError::Read { path: folder.clone(), source };
        for entry in fs::read_dir(&folder).map_err(read)? {
            let entry = entry.map_err(read)?;
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
                continue;
            }
            let path = entry.path();
            if entry.file_type().map_err(read)?.is_dir() {
                folders.push(path);
            } else if has_extension(&path, extensions) && path.is_file() {
                found.push(path);
            }
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// Whether the extension of `path`, in any case, is one of `extensions`.
pub(super) fn has_extension(path: &Path, extensions: &[&str]) -> bool {
    path.extension()
        .and_then(OsStr::to_str)
        .is_some_and(|found| extensions.iter().any(|wanted| found.eq_ignore_ascii_case(wanted)))
}

/// The contents of `files` one after the other: with `documents` with [`END_OF_TEXT`] between files, unless one already stands there, else
/// with a line end where a file lacks its last one. UTF-8 unless `kind` takes any bytes. `done` hears of bytes read.
pub(super) fn read_joined(
    files: &[PathBuf],
    kind: TokenizerKind,
    documents: bool,
    done: &mut dyn FnMut(u64),
) -> Result<Vec<u8>, CorpusError> {
    let mut joined = Vec::new();
    for path in files {
        require_file(path)?;
        let from = joined.len();
        append(path, &mut joined, done).map_err(|source| CorpusError::Read { path: path.clone(), source })?;
        let contents = &joined[from..];
        if kind != TokenizerKind::Bytes {
            if let Some(format) = formats::not_text(contents) {
                return Err(CorpusError::other_format(path.clone(), format, "text"));
            }
            utf8(contents, kind)
                .map_err(|source| CorpusError::Encode { origin: path.display().to_string(), source })?;
        }
        if from > 0 && !contents.is_empty() {
            let (before, after) = joined.split_at(from);
            let mark: &[u8] = if !documents {
                if before.ends_with(b"\n") { b"" } else { b"\n" }
            } else if before.trim_ascii_end().ends_with(END_OF_TEXT.as_bytes())
                || after.trim_ascii_start().starts_with(END_OF_TEXT.as_bytes())
            {
                b""
            } else {
                END_OF_TEXT.as_bytes()
            };
            joined.splice(from..from, mark.iter().copied());
        }
    }
    Ok(joined)
}

/// Appends the contents of a file, a block at a time.
fn append(path: &Path, to: &mut Vec<u8>, done: &mut dyn FnMut(u64)) -> io::Result<()> {
    const BLOCK: u64 = 16 << 20;
    let mut file = File::open(path)?;
    // A sparse file may be longer than any memory.
    to.try_reserve(usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX))?;
    loop {
        let read = Read::by_ref(&mut file).take(BLOCK).read_to_end(to)? as u64;
        done(read);
        if read < BLOCK {
            return Ok(());
        }
    }
}

/// `bytes` as text.
pub(super) fn utf8(bytes: &[u8], kind: TokenizerKind) -> Result<&str, TokenizerError> {
    std::str::from_utf8(bytes).map_err(|error| TokenizerError::NotUtf8 { kind, offset: error.valid_up_to() })
}

/// That `path` is an ordinary file: a pipe or a device might never end.
pub(super) fn require_file(path: &Path) -> Result<(), CorpusError> {
    let metadata = fs::metadata(path).map_err(|source| match source.kind() {
        ErrorKind::NotFound => CorpusError::Missing { path: path.to_owned() },
        _ => CorpusError::Read { path: path.to_owned(), source },
    })?;
    if metadata.is_file() { Ok(()) } else { Err(CorpusError::NotAFile { path: path.to_owned() }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_found_in_order_of_path_at_every_depth() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::create_dir_all(root.join("b/c")).unwrap();
        fs::create_dir_all(root.join(".hidden")).unwrap();
        for (name, text) in [
            ("z.txt", "z"),
            ("b/a.md", "a\n"),
            ("b/c/README.MD", "c"),
            ("a.txt", ""),
            ("b/skip.rs", "no"),
            (".hidden/a.txt", "no"),
            ("noext", "no"),
        ] {
            fs::write(root.join(name), text).unwrap();
        }
        let found = files_below(root, &["txt", "md"]).unwrap();
        let names: Vec<_> = found.iter().map(|path| path.strip_prefix(root).unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["a.txt", "b/a.md", "b/c/README.MD", "z.txt"]);
        let joined = |documents| {
            let text = read_joined(&found, TokenizerKind::Gpt2, documents, &mut |_| ()).unwrap();
            String::from_utf8(text).unwrap()
        };
        assert_eq!(joined(false), "a\nc\nz");
        assert_eq!(joined(true), "a\n<|endoftext|>c<|endoftext|>z");
    }

    #[test]
    fn no_mark_is_put_where_one_is() {
        let folder = tempfile::tempdir().unwrap();
        let files: Vec<PathBuf> = ["a<|endoftext|>\n", "b<|endoftext|>", "", "c", "<|endoftext|>d\n", "e", ""]
            .iter()
            .enumerate()
            .map(|(index, text)| {
                let path = folder.path().join(format!("{index}.txt"));
                fs::write(&path, text).unwrap();
                path
            })
            .collect();
        let mut read = 0;
        let text = read_joined(&files, TokenizerKind::Gpt2, true, &mut |more| read += more).unwrap();
        let expected = "a<|endoftext|>\nb<|endoftext|>c<|endoftext|>d\n<|endoftext|>e";
        assert_eq!(String::from_utf8(text).unwrap(), expected);
        assert_eq!(read as usize, expected.len() - END_OF_TEXT.len());
    }
}
