//! Curves for TensorBoard: event files of scalars, in the format that TensorFlow defined.
//!
//! A file is a sequence of records (TFRecord), each with checksums (CRC-32C), each an `Event` in protobuf's encoding
//! (tensorflow/core/util/event.proto, tensorflow/core/framework/summary.proto). The few fields in use are declared here, so that neither
//! TensorFlow nor a protobuf compiler is needed.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::time::{SystemTime, UNIX_EPOCH};

use prost::Message;

/// What the first record says; readers refuse other versions.
const VERSION: &str = "brain.Event:2";

/// Most event files that one process creates in one folder within a second.
const MAX_FILES: u32 = 1000;

/// An event file under construction. What is written reaches the file at [`EventFile::flush`], when the buffer is full, and on drop.
#[derive(Debug)]
pub struct EventFile {
    out: BufWriter<File>,
    path: PathBuf,
}

impl EventFile {
    /// Creates a new file in `folder`, and the folder where there is none. TensorBoard shows each folder as a run, with all its event
    /// files as one.
    ///
    /// # Errors
    /// The operating system's, where the folder or the file cannot be created or written.
    pub fn create(folder: &Path) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let seconds = now() as u64;
        // TensorBoard reads the files of a folder in the order of their names.
        let stem = format!("events.out.tfevents.{seconds:010}.{}.{}", host_name(), process::id());
        for number in 0..MAX_FILES {
            let path = folder.join(format!("{stem}.{number}"));
            match File::create_new(&path) {
                Ok(file) => {
                    let mut events = Self { out: BufWriter::new(file), path };
                    events.write(&Event {
                        wall_time: now(),
                        file_version: Some(VERSION.into()),
                        ..Event::default()
                    })?;
                    events.flush()?;
                    return Ok(events);
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::new(io::ErrorKind::AlreadyExists, format!("{}: too many event files", folder.display())))
    }

    /// Where the file is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds a point to the curve `tag` (`train/loss`: what precedes the first slash groups curves). The format keeps `value` in 32 bits.
    ///
    /// # Errors
    /// The operating system's, where the file cannot be written.
    pub fn scalar(&mut self, tag: &str, step: u64, value: f64) -> io::Result<()> {
        self.write(&Event {
            wall_time: now(),
            step: i64::try_from(step).unwrap_or(i64::MAX),
            summary: Some(Summary { value: vec![Value { tag: tag.into(), simple_value: Some(value as f32) }] }),
            ..Event::default()
        })
    }

    /// Hands everything to the operating system, so that a TensorBoard that runs sees it.
    ///
    /// # Errors
    /// The operating system's, where the file cannot be written.
    pub fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    fn write(&mut self, event: &Event) -> io::Result<()> {
        self.out.write_all(&record(&event.encode_to_vec()))
    }
}

#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    // One of these two is set: they are alternatives of one `oneof`.
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Value>,
}

#[derive(Clone, PartialEq, Message)]
struct Value {
    #[prost(string, tag = "1")]
    tag: String,
    // Optional, so that a zero is written too.
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

/// A record: length, checksum of the length, data, checksum of the data; integers in little endian.
fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(data.len() + 16);
    record.extend_from_slice(&length);
    record.extend_from_slice(&masked_crc(&length).to_le_bytes());
    record.extend_from_slice(data);
    record.extend_from_slice(&masked_crc(data).to_le_bytes());
    record
}

/// TFRecord's checksum: CRC-32C, rotated and shifted by a constant, since the checksum of data that holds its own checksum is weak.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Seconds since 1970, 0 for a clock before that.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

/// The name of this machine as far as file names can have it.
fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '-' || c == '_' { c } else { '-' };
    let name: String = name.trim().chars().take(64).map(plain).collect();
    if name.is_empty() { "localhost".into() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check value of CRC-32C's definition (RFC 3720: the polynomial of iSCSI), bit by bit, apart from the library in use.
    fn crc32c_by_bits(data: &[u8]) -> u32 {
        !data.iter().fold(u32::MAX, |crc, byte| {
            (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg()))
        })
    }

    /// The records of a file, with lengths and checksums checked, and nothing after the last.
    fn read(mut bytes: &[u8]) -> Vec<Event> {
        let unmask = |crc: u32| crc.wrapping_sub(0xa282_ead8).rotate_left(15);
        let crc_at = |bytes: &[u8]| unmask(u32::from_le_bytes(bytes[..4].try_into().unwrap()));
        let mut events = Vec::new();
        while !bytes.is_empty() {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            assert_eq!(crc_at(&bytes[8..]), crc32c_by_bits(&bytes[..8]));
            let data = &bytes[12..12 + length];
            assert_eq!(crc_at(&bytes[12 + length..]), crc32c_by_bits(data));
            events.push(Event::decode(data).unwrap());
            bytes = &bytes[16 + length..];
        }
        events
    }

    #[test]
    fn the_checksum_is_crc_32c() {
        assert_eq!(crc32c_by_bits(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
    }

    /// The bytes are what the `RecordWriter` of TensorBoard 2.21 writes for the same events.
    #[test]
    fn records_are_those_of_tensorboard() {
        let version = Event { wall_time: 1_700_000_000.5, file_version: Some(VERSION.into()), ..Event::default() };
        assert_eq!(
            comm_core::hex(&record(&version.encode_to_vec())),
            "1800000000000000a37f4b220900002040fc54d9411a0d627261696e2e4576656e743a322b353110"
        );
        let loss = Event {
            wall_time: 1_700_000_001.25,
            step: 300,
            summary: Some(Summary { value: vec![Value { tag: "train/loss".into(), simple_value: Some(-2.5) }] }),
            ..Event::default()
        };
        assert_eq!(
            comm_core::hex(&record(&loss.encode_to_vec())),
            "2100000000000000017becf60900005040fc54d94110ac022a130a110a0a747261696e2f6c6f737315000020c01a27d515"
        );
    }

    #[test]
    fn a_file_holds_its_version_and_every_point() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("new").join("run");
        let points = [("loss", 0, 0.0), ("loss", 1, 1.5), ("a tag / with ünïcode", u64::MAX, f64::NAN)];
        let before = now();
        let mut file = EventFile::create(&run).unwrap();
        for (tag, step, value) in points {
            file.scalar(tag, step, value).unwrap();
        }
        file.flush().unwrap();
        let events = read(&fs::read(file.path()).unwrap());
        assert_eq!(events[0].file_version.as_deref(), Some("brain.Event:2"));
        assert_eq!(events.len(), 1 + points.len());
        for (event, (tag, step, value)) in events[1..].iter().zip(points) {
            let summary = event.summary.as_ref().unwrap();
            assert_eq!(summary.value[0].tag, tag);
            assert_eq!(event.step, i64::try_from(step).unwrap_or(i64::MAX));
            let written = summary.value[0].simple_value.unwrap();
            assert!(written == value as f32 || written.is_nan() && value.is_nan());
            assert!(event.wall_time >= before && event.wall_time <= now());
        }
    }

    #[test]
    fn files_of_one_folder_have_names_of_their_own() {
        let folder = tempfile::tempdir().unwrap();
        let files: Vec<_> = (0..3).map(|_| EventFile::create(folder.path()).unwrap()).collect();
        for file in &files {
            let name = file.path().file_name().unwrap().to_str().unwrap();
            let parts: Vec<&str> = name.split('.').collect();
            assert_eq!(parts[..3], ["events", "out", "tfevents"], "{name}");
            assert!(parts[3].len() == 10 && parts[3].parse::<u64>().is_ok(), "{name}");
            assert_eq!(parts[5], process::id().to_string(), "{name}");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[test]
    fn what_is_dropped_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = EventFile::create(folder.path()).unwrap();
        let path = file.path().to_owned();
        assert_eq!(read(&fs::read(&path).unwrap()).len(), 1, "a file is valid from its creation on");
        file.scalar("loss", 7, 3.0).unwrap();
        drop(file);
        assert_eq!(read(&fs::read(&path).unwrap())[1].step, 7);
    }
}
