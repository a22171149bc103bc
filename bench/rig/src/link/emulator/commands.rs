//! What an emulator is told, one line each.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;

/// Far more than the spec of a link with all ends that it may have.
const LONGEST_LINE: usize = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    /// Say what has been counted, in one line.
    Counters,
    /// Count from the start, and repeat the same decisions.
    Reset,
}

impl Command {
    pub(super) fn text(self) -> &'static str {
        match self {
            Command::Counters => "counters",
            Command::Reset => "reset",
        }
    }

    fn parse(line: &str) -> Result<Self, String> {
        let known = [Command::Counters, Command::Reset];
        known.into_iter().find(|command| command.text() == line).ok_or(format!("{line:?} is not a command"))
    }
}

/// A pipe from which lines come.
pub(super) struct Commands {
    input: File,
    buffer: Vec<u8>,
}

impl Commands {
    pub(super) fn new(input: OwnedFd) -> Self {
        Commands { input: input.into(), buffer: Vec::new() }
    }

    pub(super) fn input(&self) -> &File {
        &self.input
    }

    /// Reads what is there, or waits if nothing is; whether more can come.
    ///
    /// # Errors
    /// The kernel's, or a line that has no end.
    pub(super) fn fill(&mut self) -> Result<bool, String> {
        let mut bytes = [0; 4096];
        if self.buffer.len() > LONGEST_LINE {
            return Err(format!("a command of more than {LONGEST_LINE} bytes"));
        }
        loop {
            match self.input.read(&mut bytes) {
                Ok(count) => {
                    self.buffer.extend_from_slice(&bytes[..count]);
                    return Ok(count > 0);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(format!("reading commands: {error}")),
            }
        }
    }

    /// The next line, if all of it has come.
    ///
    /// # Errors
    /// It is no text.
    pub(super) fn line(&mut self) -> Result<Option<String>, String> {
        let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') else { return Ok(None) };
        let line = self.buffer.drain(..=end).take(end).collect();
        String::from_utf8(line).map(Some).map_err(|_| "a command that is not text".into())
    }

    /// The next command, if all of it has come.
    ///
    /// # Errors
    /// It is none.
    pub(super) fn next(&mut self) -> Result<Option<Command>, String> {
        self.line()?.map(|line| Command::parse(&line)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn commands_come_in_pieces() {
        let (reader, mut writer) = io::pipe().unwrap();
        let mut commands = Commands::new(reader.into());
        writer.write_all(b"first\ncoun").unwrap();
        assert!(commands.fill().unwrap());
        assert_eq!(commands.line().unwrap().as_deref(), Some("first"));
        assert_eq!(commands.next().unwrap(), None);
        writer.write_all(b"ters\nreset\nRESET\n\xff\n").unwrap();
        assert!(commands.fill().unwrap());
        assert_eq!(commands.next().unwrap(), Some(Command::Counters));
        assert_eq!(commands.next().unwrap(), Some(Command::Reset));
        assert!(commands.next().unwrap_err().contains("RESET"));
        assert!(commands.next().is_err());
        drop(writer);
        assert!(!commands.fill().unwrap());
    }

    #[test]
    fn a_line_without_an_end_is_refused() {
        let mut commands = Commands::new(File::open("/dev/zero").unwrap().into());
        let why = (0..1000).find_map(|_| commands.fill().err()).unwrap();
        assert!(why.contains("more than"), "{why}");
    }
}
