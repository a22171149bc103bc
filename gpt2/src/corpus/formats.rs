//! What a file looks like that is neither text nor token ids: files are taken for what their first bytes show, whatever their names say.
//!
//! A rule must never refuse a file that is right. Bytes that say "gzip" are two token ids as well, so for short signatures more of the
//! format is looked at than the signature; ids of GPT-2 end at 50,256, so a signature with a larger 16-bit number in it is none of its shards.

/// A kind of file, and what its owner can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Format {
    /// As in "looks like …".
    pub(super) name: &'static str,
    /// A clause that says what to do.
    pub(super) advice: &'static str,
}

const UNPACK: &str = "unpack it first";
const IDS: &str = "write its ids as 16-bit numbers without a header (numpy: `ids.astype('<u2').tofile('train.bin')`)";
const TEXT_COLUMN: &str = "write its text to a .txt file";
const UTF8: &str = "convert it to UTF-8 (`iconv -f UTF-16 -t UTF-8`)";
const NO_DATA: &str = "give the text or the token ids to train on";

/// Signatures at the start of a file that are long enough, or hold a number that is no id of GPT-2.
const SIGNATURES: [(&[u8], &str, &str); 28] = [
    (b"\x93NUMPY", "a NumPy array (.npy)", IDS),
    (b"ARROW1\0\0", "an Arrow file", TEXT_COLUMN),
    (b"\xff\xff\xff\xff", "a stream of Arrow", TEXT_COLUMN),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", TEXT_COLUMN),
    (b"SQLite format 3\0", "an SQLite database", TEXT_COLUMN),
    (b"MMIDIDX\0\0", "an index of Megatron (.idx)", "give the .bin file beside it"),
    (b"TNTIDX\0\0", "an index of fairseq (.idx)", "give the text itself"),
    (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", "a file of torch.save", NO_DATA),
    (b"\x28\xb5\x2f\xfd", "a zstd file", UNPACK),
    (b"\xfd7zXZ\0", "an xz file", UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    (b"Rar!\x1a\x07", "a RAR archive", UNPACK),
    (b"\xff\x06\0\0sNaPpY", "a Snappy file", UNPACK),
    (b"\x89PNG\r\n\x1a\n", "a PNG image", NO_DATA),
    (b"\xff\xd8\xff", "a JPEG image", NO_DATA),
    (b"GIF87a", "a GIF image", NO_DATA),
    (b"GIF89a", "a GIF image", NO_DATA),
    (b"OggS\0\x02", "an Ogg file", NO_DATA),
    (b"fLaC\0\0\0\x22", "a FLAC file", NO_DATA),
    (b"%PDF-1.", "a PDF document", TEXT_COLUMN),
    (b"%PDF-2.", "a PDF document", TEXT_COLUMN),
    (b"%!PS-Adobe-", "a PostScript document", TEXT_COLUMN),
    (b"{\\rtf1", "a document in RTF", TEXT_COLUMN),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a document of Microsoft Office", TEXT_COLUMN),
    (b"\xff\xfe\0\0", "UTF-32 text", "convert it to UTF-8 (`iconv -f UTF-32 -t UTF-8`)"),
    (b"\0\0\xfe\xff", "UTF-32 text", "convert it to UTF-8 (`iconv -f UTF-32 -t UTF-8`)"),
    (b"\xff\xfe", "UTF-16 text", UTF8),
    (b"\xfe\xff", "UTF-16 text", UTF8),
];

/// The known format that `bytes`, a whole file, begins like.
pub(super) fn known(bytes: &[u8]) -> Option<Format> {
    let signature = SIGNATURES.iter().find(|(signature, ..)| bytes.starts_with(signature));
    let signature = signature.filter(|_| !begins_like_a_picture_or_pdf(bytes));
    let found = signature.map(|&(_, name, advice)| (name, advice)).or_else(|| by_structure(bytes))?;
    Some(Format { name: found.0, advice: found.1 })
}

/// What a `.bin` file looks like that holds no 16-bit ids.
pub(super) fn not_ids(bytes: &[u8]) -> Option<Format> {
    let plain = || {
        looks_like_text(bytes)
            .then_some(Format { name: "plain text", advice: "if it is text, give it a name that ends with .txt" })
    };
    known(bytes).or_else(|| wide_numbers(bytes)).or_else(plain)
}

/// What a text file looks like that holds no UTF-8 text.
pub(super) fn not_text(bytes: &[u8]) -> Option<Format> {
    known(bytes).or_else(|| {
        let sample = sample(bytes);
        let printable = |byte: &u8| matches!(byte, b'\t' | b'\n' | b'\r' | b' '..=b'~');
        let half = |zero: usize| {
            let pairs = sample.as_chunks::<2>().0;
            pairs.len() >= 8 && pairs.iter().all(|pair| pair[zero] == 0 && printable(&pair[1 - zero]))
        };
        (half(0) || half(1)).then_some(Format { name: "UTF-16 text", advice: UTF8 })
    })
}

/// Whether a text merely begins with the name of a format that is not text itself, as one about formats may. A GIF has bytes that no text
/// has; a PDF may do without, but says near its end where its table of contents is. RTF and PostScript are text throughout.
fn begins_like_a_picture_or_pdf(bytes: &[u8]) -> bool {
    let tail = &bytes[bytes.len().saturating_sub(1024)..];
    let is_pdf = || tail.windows(9).any(|nine| nine == b"startxref");
    (bytes.starts_with(b"GIF8") || bytes.starts_with(b"%PDF-") && !is_pdf())
        && parts(bytes).iter().all(|part| is_text(part))
}

/// Formats whose signatures are short: what follows them must fit, too.
fn by_structure(bytes: &[u8]) -> Option<(&'static str, &'static str)> {
    let at = |index: usize| bytes.get(index).copied();
    let u16_at = |index: usize| bytes.get(index..)?.first_chunk().map(|&two| u16::from_le_bytes(two));
    let u32_at = |index: usize| bytes.get(index..)?.first_chunk().map(|&four| u32::from_le_bytes(four));
    let u32_be = |index: usize| bytes.get(index..)?.first_chunk().map(|&four| u32::from_be_bytes(four));
    let u64_at = |index: usize| bytes.get(index..)?.first_chunk().map(|&eight| u64::from_le_bytes(eight));
    let last = |count: usize| bytes.len().checked_sub(count).and_then(|from| bytes.get(from..)).unwrap_or_default();
    let starts = |signature: &[u8]| bytes.starts_with(signature);

    // Version needed, and method of compression.
    let zip = starts(b"PK\x03\x04")
        && u16_at(4).is_some_and(|version| version & 0xff <= 63)
        && u16_at(8).is_some_and(|method| matches!(method, 0 | 8 | 9 | 12 | 14 | 93..=99));
    if zip || starts(b"PK\x05\x06\0\0\0\0\0\0\0\0") {
        return Some(("a zip archive (.zip, .npz, .pt)", "unpack it, or write its ids or its text to a file"));
    }
    // Flags, and at the end of the header what compressed it: level and system.
    if starts(b"\x1f\x8b\x08")
        && at(3).is_some_and(|flags| flags <= 0x1f)
        && matches!(at(8), Some(0 | 2 | 4))
        && matches!(at(9), Some(0..=13 | 255))
    {
        return Some(("a gzip file", UNPACK));
    }
    if starts(b"BZh") && matches!(at(3), Some(b'1'..=b'9')) && bytes.get(4..10) == Some(b"1AY&SY") {
        return Some(("a bzip2 file", UNPACK));
    }
    if starts(b"\x04\x22\x4d\x18")
        && at(4).is_some_and(|flags| flags & 0xc2 == 0x40)
        && at(5).is_some_and(|sizes| sizes & 0x8f == 0 && sizes >= 0x40)
    {
        return Some(("an lz4 file", UNPACK));
    }
    if matches!(bytes.get(257..265), Some(b"ustar\x0000" | b"ustar  \0")) {
        return Some(("a tar archive", UNPACK));
    }
    if starts(b"PAR1") && last(4) == b"PAR1" && bytes.len() >= 12 {
        return Some(("a Parquet file", TEXT_COLUMN));
    }
    if starts(b"FEA1") && last(4) == b"FEA1" && bytes.len() >= 12 {
        return Some(("a Feather file", TEXT_COLUMN));
    }
    if starts(b"GGUF") && u32_at(4).is_some_and(|version| (1..=9).contains(&version)) {
        return Some(("a model in GGUF", NO_DATA));
    }
    if starts(b"\x7fELF") && matches!(at(4), Some(1 | 2)) && matches!(at(5), Some(1 | 2)) && at(6) == Some(1) {
        return Some(("a program (ELF)", NO_DATA));
    }
    if starts(b"RIFF") && matches!(bytes.get(8..12), Some(b"WAVE" | b"AVI " | b"WEBP")) {
        return Some(("an audio, video or image file (RIFF)", NO_DATA));
    }
    // Its header's length, then JSON of that length.
    let safetensors = u64_at(0).and_then(|length| usize::try_from(length).ok()).is_some_and(|length| {
        let header = length.checked_add(8).and_then(|end| bytes.get(8..end)).unwrap_or_default();
        header.starts_with(b"{") && header.trim_ascii_end().ends_with(b"}")
    });
    if safetensors {
        return Some(("a model in safetensors", NO_DATA));
    }
    // A pickle names its protocol and ends with STOP; from protocol 4 on a frame follows, before that an object that is begun.
    let pickle = starts(b"\x80")
        && last(1) == b"."
        && match at(1) {
            Some(2 | 3) => is_remembered(&bytes[2..]),
            Some(4 | 5) => at(2) == Some(0x95) && u64_at(3).is_some_and(|frame| frame <= bytes.len() as u64),
            _ => false,
        };
    if pickle {
        return Some(("a pickle of Python", IDS));
    }
    if u32_be(0) == Some(LLM_C) && u32_be(4) == Some(1) {
        return Some(("a shard of llm.c in big-endian order", "write it again on a little-endian machine"));
    }
    None
}

/// First integer of a shard of llm.c.
const LLM_C: u32 = 20_240_520;

/// Whether the first object of a pickle (a list, a dictionary, a string, or what a module exports) is followed by `BINPUT 0`, by which
/// Python remembers it.
fn is_remembered(object: &[u8]) -> bool {
    let memo = |at: usize| object.get(at..at + 2) == Some(b"q\0");
    match object.first() {
        Some(b']' | b'}' | b')') => memo(1),
        Some(b'X') => {
            let length = object.get(1..).and_then(|rest| rest.first_chunk()).map(|&four| u32::from_le_bytes(four));
            length
                .and_then(|length| usize::try_from(length).ok()?.checked_add(5))
                .is_some_and(|at| at < object.len() && memo(at))
        }
        Some(b'c') => {
            let mut ends = object.iter().enumerate().take(200).filter(|(_, byte)| **byte == b'\n');
            ends.nth(1).is_some_and(|(at, _)| memo(at + 1))
        }
        _ => false,
    }
}

/// Numbers of 32 or 64 bits: read as 16-bit ids, every second one (or three of four) would be 0 throughout.
fn wide_numbers(bytes: &[u8]) -> Option<Format> {
    const LEAST: usize = 32;
    let found = |name| Some(Format { name, advice: IDS });
    let sample = sample(bytes);
    if bytes.len().is_multiple_of(8) && sample.len() >= 8 * LEAST {
        let eights = || sample.as_chunks::<8>().0.iter().copied();
        if all_ids(eights().map(u64::from_le_bytes)) {
            return found("64-bit integers");
        }
        if all_ids(eights().map(u64::from_be_bytes)) {
            return found("64-bit integers in big-endian order");
        }
        if all_ids(eights().filter_map(|eight| whole(f64::from_le_bytes(eight)))) {
            return found("64-bit floating-point numbers");
        }
    }
    if bytes.len().is_multiple_of(4) && sample.len() >= 4 * LEAST {
        let fours = || sample.as_chunks::<4>().0.iter().copied();
        if all_ids(fours().map(|four| u32::from_le_bytes(four).into())) || larger_vocabulary(&sample) {
            return found("32-bit integers");
        }
        if all_ids(fours().map(|four| u32::from_be_bytes(four).into())) {
            return found("32-bit integers in big-endian order");
        }
        if all_ids(fours().filter_map(|four| whole(f32::from_le_bytes(four).into()))) {
            return found("32-bit floating-point numbers");
        }
    }
    None
}

/// Whether all `numbers` are below 2^16 and not all the same. In a file of 16-bit ids every second one would be 0, which is `!`.
fn all_ids(numbers: impl Iterator<Item = u64>) -> bool {
    let (mut least, mut most) = (u64::MAX, 0);
    for number in numbers {
        (least, most) = (least.min(number), most.max(number));
    }
    most < 1 << 16 && least < most
}

/// A number as an id, `u64::MAX` where it is none.
fn whole(number: f64) -> Option<u64> {
    let id = (0.0..65_536.0).contains(&number) && number.fract() == 0.0 && number.is_sign_positive();
    Some(if id { number as u64 } else { u64::MAX })
}

/// 32-bit ids of a vocabulary beyond 2^16, of which the largest have 2^18: the upper halves are 0 to 3, most of them 0, and the lower
/// ones differ.
fn larger_vocabulary(sample: &[u8]) -> bool {
    const LEAST: usize = 1024;
    let fours = sample.as_chunks::<4>().0;
    if fours.len() < LEAST {
        return false;
    }
    let numbers = || fours.iter().map(|&four| u32::from_le_bytes(four));
    let low = numbers().filter(|&number| number < 1 << 16).count();
    let different: std::collections::HashSet<u32> = numbers().map(|number| number & 0xffff).take(LEAST).collect();
    numbers().all(|number| number < 1 << 18) && 2 * low > fours.len() && different.len() >= 16
}

/// Whether the sample is UTF-8 without control characters. Ids of GPT-2 as bytes have many: those of the commonest words lie below 8,192.
fn looks_like_text(bytes: &[u8]) -> bool {
    const LEAST: usize = 64;
    bytes.len() >= LEAST && parts(bytes).iter().all(|part| is_text(part))
}

/// Whether a part of a file is UTF-8 without control characters; it may begin and end inside a character.
fn is_text(part: &[u8]) -> bool {
    let begin = part.iter().take(3).take_while(|&&byte| byte & 0xc0 == 0x80).count();
    let part = &part[begin..];
    let valid = match std::str::from_utf8(part) {
        Ok(text) => text,
        Err(error) if error.error_len().is_none() => {
            std::str::from_utf8(&part[..error.valid_up_to()]).unwrap_or_default()
        }
        Err(_) => return false,
    };
    valid.chars().all(|character| !character.is_control() || matches!(character, '\t' | '\n' | '\r' | '\x0c'))
}

/// Up to 64 KiB each from the start, the middle and the end, at places that are multiples of 8.
fn parts(bytes: &[u8]) -> Vec<&[u8]> {
    const PART: usize = 64 << 10;
    if bytes.len() <= 3 * PART {
        return vec![bytes];
    }
    let middle = bytes.len() / 2 / 8 * 8;
    let end = (bytes.len() - PART) / 8 * 8;
    vec![&bytes[..PART], &bytes[middle..middle + PART], &bytes[end..]]
}

fn sample(bytes: &[u8]) -> Vec<u8> {
    parts(bytes).concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(values: impl IntoIterator<Item = u16>) -> Vec<u8> {
        values.into_iter().flat_map(u16::to_le_bytes).collect()
    }

    fn name(found: Option<Format>) -> &'static str {
        found.map_or("nothing", |format| format.name)
    }

    /// Beginnings of real files.
    fn specimens() -> Vec<(Vec<u8>, &'static str)> {
        let with = |start: &[u8], rest: usize| [start, &vec![7; rest]].concat();
        let mut tar = vec![0; 1024];
        tar[..5].copy_from_slice(b"a.txt");
        tar[257..265].copy_from_slice(b"ustar\x0000");
        let mut big_endian: Vec<u8> = [20_240_520_u32, 1, 3].iter().flat_map(|number| number.to_be_bytes()).collect();
        big_endian.resize(1030, 0);
        let json = br#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}  "#;
        vec![
            (with(b"\x93NUMPY\x01\0v\0{'descr': '<u2', 'fortran_order': False", 300), "a NumPy array (.npy)"),
            (with(b"PK\x03\x04\x14\0\0\0\x08\0", 50), "a zip archive (.zip, .npz, .pt)"),
            (with(b"PK\x03\x04\0\0\0\x08\0\0\0\0\0\0", 50), "a zip archive (.zip, .npz, .pt)"),
            (with(b"\x1f\x8b\x08\0\0\0\0\0\0\x03", 50), "a gzip file"),
            (with(b"\x1f\x8b\x08\x08\x12\x34\x56\x65\x02\xffx.txt\0", 50), "a gzip file"),
            (with(b"BZh91AY&SY", 40), "a bzip2 file"),
            (with(b"\x28\xb5\x2f\xfd\x24", 40), "a zstd file"),
            (with(b"\x04\x22\x4d\x18\x64\x40\xa7", 40), "an lz4 file"),
            (with(b"\xfd7zXZ\0\0\x04", 40), "an xz file"),
            (tar, "a tar archive"),
            ([b"PAR1".as_slice(), &[9; 40], b"PAR1"].concat(), "a Parquet file"),
            (with(b"ARROW1\0\0", 40), "an Arrow file"),
            (with(b"\xff\xff\xff\xff\x80\0\0\0", 40), "a stream of Arrow"),
            (with(b"\x89HDF\r\n\x1a\n", 40), "an HDF5 file"),
            (with(b"GGUF\x03\0\0\0", 40), "a model in GGUF"),
            (with(b"\x7fELF\x02\x01\x01\0", 40), "a program (ELF)"),
            (with(b"MMIDIDX\0\0\x01\0\0\0\0\0\0\0\x08", 40), "an index of Megatron (.idx)"),
            ([(json.len() as u64).to_le_bytes().as_slice(), json, &[0; 4]].concat(), "a model in safetensors"),
            (
                b"\x80\x04\x95\x1a\0\0\0\0\0\0\0}\x94(K\x01\x8c\x01a\x94K\x02\x8c\x01b\x94u.".to_vec(),
                "a pickle of Python",
            ),
            (b"\x80\x03}q\0(X\x0a\0\0\0vocab_sizeq\x01K\x41u.".to_vec(), "a pickle of Python"),
            (b"\x80\x02]q\0(K\x01K\x02e.".to_vec(), "a pickle of Python"),
            (with(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", 40), "a PNG image"),
            (with(b"\xff\xd8\xff\xe0\0\x10JFIF", 40), "a JPEG image"),
            (with(b"%PDF-1.7\n", 40), "a PDF document"),
            (b"%PDF-1.4\n1 0 obj\n<< >>\nendobj\nstartxref\n9\n%%EOF\n".to_vec(), "a PDF document"),
            (b"%!PS-Adobe-3.0\n%%Pages: 1\nshowpage\n".to_vec(), "a PostScript document"),
            (b"{\\rtf1\\ansi Hello}".to_vec(), "a document in RTF"),
            (with(b"GIF89a\x01\0\x01\0\x80\0\0\xff\xff\xff", 40), "a GIF image"),
            (with(b"RIFF\x24\0\0\0WAVEfmt ", 40), "an audio, video or image file (RIFF)"),
            ("\u{feff}text".encode_utf16().flat_map(u16::to_le_bytes).collect(), "UTF-16 text"),
            ("\u{feff}text".encode_utf16().flat_map(u16::to_be_bytes).collect(), "UTF-16 text"),
            (b"\xff\xfe\0\0t\0\0\0".to_vec(), "UTF-32 text"),
            (big_endian, "a shard of llm.c in big-endian order"),
        ]
    }

    #[test]
    fn files_of_other_formats_are_known_by_their_first_bytes() {
        for (bytes, expected) in specimens() {
            assert_eq!(name(known(&bytes)), expected, "{bytes:02x?}");
            assert_eq!(name(not_ids(&bytes)), expected, "{expected}");
            assert_eq!(name(not_text(&bytes)), expected, "{expected}");
        }
    }

    #[test]
    fn numbers_of_other_widths_are_known_by_their_zeros() {
        let numbers = || (0..60_000_u32).map(|index| index.wrapping_mul(2_654_435_761) % 50_257);
        let of = |bytes: Vec<u8>| name(not_ids(&bytes));
        assert_eq!(of(numbers().flat_map(u32::to_le_bytes).collect()), "32-bit integers");
        assert_eq!(of(numbers().flat_map(u32::to_be_bytes).collect()), "32-bit integers in big-endian order");
        assert_eq!(of(numbers().flat_map(|id| u64::from(id).to_le_bytes()).collect()), "64-bit integers");
        assert_eq!(
            of(numbers().flat_map(|id| u64::from(id).to_be_bytes()).collect()),
            "64-bit integers in big-endian order"
        );
        assert_eq!(of(numbers().flat_map(|id| (id as f32).to_le_bytes()).collect()), "32-bit floating-point numbers");
        assert_eq!(of(numbers().flat_map(|id| f64::from(id).to_le_bytes()).collect()), "64-bit floating-point numbers");
        // Ids of a vocabulary of 200,000, of which small ones are commoner.
        let skewed = (0..60_000_u64).map(|index| {
            let uniform = (index.wrapping_mul(2_654_435_761) % 65_536) as f64 / 65_536.0;
            (uniform * uniform * uniform * 200_000.0) as u32
        });
        assert_eq!(of(skewed.flat_map(u32::to_le_bytes).collect()), "32-bit integers");
        assert_eq!(of(numbers().take(32).flat_map(u32::to_le_bytes).collect()), "32-bit integers");
    }

    #[test]
    fn text_without_a_mark_is_known_by_its_characters() {
        let text = "It was a bright cold day in April, and the clocks were striking thirteen.\n";
        assert_eq!(name(not_ids(text.as_bytes())), "plain text");
        assert_eq!(name(not_ids("東京は日本の首都である。\n".repeat(9_000).as_bytes())), "plain text");
        assert_eq!(name(not_ids(br#"{"text": "one"}"#.repeat(20).as_slice())), "plain text");
        let wide: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
        assert_eq!(name(not_text(&wide)), "UTF-16 text");
        let wide: Vec<u8> = text.encode_utf16().flat_map(u16::to_be_bytes).collect();
        assert_eq!(name(not_text(&wide)), "UTF-16 text");
    }

    #[test]
    fn what_is_right_is_taken_for_nothing_else() {
        let gpt2 = crate::tokenizer::Tokenizer::gpt2();
        let texts = [
            "1,2,3,4,5,6,7,8,9,10\n".repeat(3_000),
            "\"a\"b\"c\"d\"e\n".repeat(3_000),
            "!!!! ! ! wow! no! yes! ".repeat(3_000),
            "a!b!c!d!e! $5 $6 #1 #2 \"x\" ".repeat(3_000),
            "fn main() { println!(\"{}\", 1 + 1); }\n".repeat(3_000),
            "ÄÖÜ 漢字 \u{1f980} ".repeat(3_000),
            "PK\u{3}\u{4} and BZh9 and %PDF are names of formats. ".repeat(300),
            "\0\u{1}\0".repeat(1_000),
            "GIF89a is a format of images.".into(),
            "GIF87a came before, é.\n".repeat(20_000),
            "%PDF-1.4 is the first line of many a document.\n".into(),
            "%PDF-2.0 is newer.\n".repeat(2_000),
        ];
        for text in texts {
            assert_eq!(not_text(text.as_bytes()), None, "{:.40}", text);
            let shard = ids(gpt2.encode(&text).unwrap());
            assert_eq!(not_ids(&shard), None, "{:.40}", text);
            // Shards begin anywhere, and ids of one shard may be those of a few kinds of words.
            for from in (2..shard.len().min(600)).step_by(2) {
                assert_eq!(not_ids(&shard[from..]), None, "{:.40} from {from}", text);
            }
        }
        let mut random = comm_core::splitmix::SplitMix64::new(3);
        for _ in 0..2_000 {
            let length = 1 + random.below(200);
            let shard = ids((0..length).map(|_| random.below(50_257) as u16));
            assert_eq!(not_ids(&shard), None, "{shard:02x?}");
        }
        // One id over and over, as an untrained tokenizer or padding has it.
        for id in [0, 1, 257, 50_256] {
            assert_eq!(not_ids(&ids([id; 5_000])), None, "{id}");
        }
    }
}
