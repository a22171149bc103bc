//! Text files: finding them in a fixed order and reading them as one text.

use std::{
    ffi::OsStr,
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use super::CorpusError;
use crate::tokenizer::{TokenizerError, TokenizerKind};

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

/// The contents of `files` one after the other, with a line end where a file lacks its last one; UTF-8 unless `kind`
/// takes any bytes.
pub(super) fn read_joined(files: &[PathBuf], kind: TokenizerKind) -> Result<Vec<u8>, CorpusError> {
    let mut joined = Vec::new();
    for (index, path) in files.iter().enumerate() {
        require_file(path)?;
        let contents = fs::read(path).map_err(|source| CorpusError::Read { path: path.clone(), source })?;
        if kind != TokenizerKind::Bytes {
            utf8(&contents, kind)
                .map_err(|source| CorpusError::Encode { origin: path.display().to_string(), source })?;
        }
        joined.extend_from_slice(&contents);
        if index + 1 < files.len() && !contents.is_empty() && !contents.ends_with(b"\n") {
            joined.push(b'\n');
        }
    }
    Ok(joined)
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
        assert_eq!(read_joined(&found, TokenizerKind::Gpt2).unwrap(), b"a\nc\nz");
    }
}
