//! Files of rows.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use serde::Serialize;

use crate::BenchError;

/// A file of JSON lines, each on disk as soon as it is known.
pub struct Lines {
    file: File,
    path: String,
}

impl Lines {
    pub fn create(path: &Path) -> Result<Self, BenchError> {
        // Rows of an earlier run are hours of somebody's time.
        let file = File::create_new(path)
            .map_err(|error| format!("{}: {error}; give another folder with --out", path.display()))?;
        Ok(Lines { file, path: path.display().to_string() })
    }

    pub fn write(&mut self, value: &impl Serialize) -> Result<(), BenchError> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        self.file.write_all(&line).map_err(|error| format!("{}: {error}", self.path).into())
    }
}
