//! Reading the strings of a column of Parquet.

use parquet::basic::Type;
use parquet::column::reader::ColumnReader;
use parquet::data_type::ByteArray;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::PrepareError;
use super::documents::{Fault, Joiner, Place};

/// Rows that are read at a time.
const ROWS: usize = 64;

impl Place<'_> {
    pub(super) fn parquet(&mut self, field: &str, joiner: &mut Joiner<'_, '_>) -> Result<(), Fault> {
        let reader = SerializedFileReader::new(self.open()?).map_err(|error| self.broken(&error))?;
        let schema = reader.metadata().file_metadata().schema_descr_ptr();
        let columns = 0..schema.num_columns();
        let Some(column) = columns.clone().find(|column| schema.column(*column).path().string() == field) else {
            let names: Vec<String> = columns.map(|column| schema.column(column).path().string()).collect();
            return Err(self.whole(format!(
                "no column '{field}', only {}; name the column of the text with --field",
                names.join(", ")
            )));
        };
        let description = schema.column(column);
        if description.physical_type() != Type::BYTE_ARRAY || description.max_rep_level() > 0 {
            return Err(self.whole(format!(
                "the column '{field}' does not hold strings; name the column of the text with --field"
            )));
        }
        for group in 0..reader.num_row_groups() {
            let group = reader.get_row_group(group).map_err(|error| self.broken(&error))?;
            let mut values = match group.get_column_reader(column).map_err(|error| self.broken(&error))? {
                ColumnReader::ByteArrayColumnReader(values) => values,
                _ => return Err(self.whole(format!("the column '{field}' does not hold strings"))),
            };
            loop {
                let (mut levels, mut strings): (Vec<i16>, Vec<ByteArray>) = (Vec::new(), Vec::new());
                let read = values.read_records(ROWS, Some(&mut levels), None, &mut strings);
                let (rows, ..) = read.map_err(|error| self.broken(&error))?;
                if rows == 0 {
                    break;
                }
                self.rows(rows, &levels, description.max_def_level(), &strings, joiner)?;
            }
            self.advance(u64::try_from(group.metadata().compressed_size()).unwrap_or(0));
        }
        Ok(())
    }

    /// Hands on the strings of so many rows, none of which is null.
    fn rows(
        &mut self,
        rows: usize,
        levels: &[i16],
        present: i16,
        strings: &[ByteArray],
        joiner: &mut Joiner<'_, '_>,
    ) -> Result<(), Fault> {
        let mut strings = strings.iter();
        for row in 0..rows {
            self.line += 1;
            let is_null = levels.get(row).is_some_and(|level| *level < present);
            let Some(string) = strings.next().filter(|_| !is_null) else {
                return Err(self.wrong("it holds null instead of a string; leave out such rows"));
            };
            let text = std::str::from_utf8(string.data()).map_err(|_| self.wrong("the string is not UTF-8"))?;
            joiner.end_document()?;
            joiner.text(text)?;
        }
        Ok(())
    }

    fn broken(&self, error: &ParquetError) -> Fault {
        self.whole(format!("cannot be read as Parquet: {error}; fetch or write it again"))
    }

    fn whole(&self, what: String) -> Fault {
        PrepareError::File { path: self.path.to_owned(), what }.into()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::path::Path;
    use std::sync::Arc;

    use parquet::basic::{Compression, ZstdLevel};
    use parquet::data_type::ByteArrayType;
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;

    use crate::corpus::prepare::{HeldOut, PrepareOptions, prepare};

    /// Groups of rows, in each of which null is `None`.
    fn write(path: &Path, groups: &[&[Option<&str>]], compression: Compression) {
        let schema = parse_message_type("message all { required int64 id; optional binary text (UTF8); }").unwrap();
        let properties = WriterProperties::builder().set_compression(compression).build();
        let file = File::create(path).unwrap();
        let mut file = SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties)).unwrap();
        for group in groups {
            let mut writer = file.next_row_group().unwrap();
            let mut ids = writer.next_column().unwrap().unwrap();
            let numbers: Vec<i64> = (0..group.len() as i64).collect();
            ids.typed::<parquet::data_type::Int64Type>().write_batch(&numbers, None, None).unwrap();
            ids.close().unwrap();
            let mut texts = writer.next_column().unwrap().unwrap();
            let strings: Vec<_> = group.iter().flatten().map(|text| text.as_bytes().to_vec().into()).collect();
            let levels: Vec<i16> = group.iter().map(|text| i16::from(text.is_some())).collect();
            texts.typed::<ByteArrayType>().write_batch(&strings, Some(&levels), None).unwrap();
            texts.close().unwrap();
            writer.close().unwrap();
        }
        file.close().unwrap();
    }

    fn options() -> PrepareOptions {
        PrepareOptions {
            field: "text".into(),
            documents: true,
            shard_tokens: 100,
            held_out: HeldOut::Share(0.1),
            overwrite: false,
        }
    }

    #[test]
    fn rows_are_documents_as_those_of_json_lines() {
        let folder = tempfile::tempdir().unwrap();
        let texts: Vec<String> = (0..300).map(|row| format!("Row {row} is here.{}", "\n".repeat(row % 3))).collect();
        let rows: Vec<Option<&str>> = texts.iter().map(|text| Some(text.as_str())).collect();
        let lines: Vec<String> = texts.iter().map(|text| serde_json::json!({ "text": text }).to_string()).collect();
        let json = folder.path().join("all.jsonl");
        fs::write(&json, lines.join("\n")).unwrap();
        let shards = |input: &Path, out: &str| {
            let out = folder.path().join(out);
            prepare(&[input.into()], &out, &options(), &mut |_| ()).unwrap();
            let mut names: Vec<_> = fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().path()).collect();
            names.sort();
            names.iter().map(|name| fs::read(name).unwrap()).collect::<Vec<_>>()
        };
        let expected = shards(&json, "json");
        let zstd = Compression::ZSTD(ZstdLevel::default());
        for (index, compression) in [Compression::UNCOMPRESSED, Compression::SNAPPY, zstd].into_iter().enumerate() {
            let path = folder.path().join(format!("{index}.parquet"));
            write(&path, &[&rows[..100], &rows[100..101], &rows[101..]], compression);
            assert!(shards(&path, &format!("parquet-{index}")) == expected, "{compression:?}");
        }
    }

    #[test]
    fn what_is_wrong_is_said_with_its_row() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.parquet");
        let said = |options: &PrepareOptions| {
            prepare(std::slice::from_ref(&path), &folder.path().join("out"), options, &mut |_| ())
                .unwrap_err()
                .to_string()
        };
        write(&path, &[&[Some("one"), Some("two")], &[Some("three"), None]], Compression::SNAPPY);
        assert!(
            said(&options()).contains("a.parquet, row 4: it holds null instead of a string"),
            "{}",
            said(&options())
        );
        let other = |field: &str| said(&PrepareOptions { field: field.into(), ..options() });
        assert!(other("body").contains("no column 'body', only id, text"), "{}", other("body"));
        assert!(other("id").contains("does not hold strings"), "{}", other("id"));
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() - 20]).unwrap();
        assert!(said(&options()).contains("cannot be read as Parquet"), "{}", said(&options()));
    }
}
