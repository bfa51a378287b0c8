//! A look at Thrift's compact form before a library trusts it: lists and strings that announce more
//! than the bytes that follow would have room made for them.

/// Deepest nesting of structures; parquet's footer has fewer.
const MOST_DEPTH: usize = 32;

/// Whether `bytes` start with a structure whose lists and strings can all be there.
pub(super) fn is_plausible(bytes: &[u8]) -> bool {
    Walk { rest: bytes }.structure(0).is_some()
}

struct Walk<'a> {
    rest: &'a [u8],
}

impl Walk<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (&byte, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(byte)
    }

    fn varint(&mut self) -> Option<u64> {
        let (mut value, mut shift) = (0u64, 0);
        loop {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f).checked_shl(shift)?;
            if byte & 0x80 == 0 {
                return Some(value);
            }
            shift += 7;
        }
    }

    fn pass(&mut self, n_bytes: u64) -> Option<()> {
        self.rest = self.rest.get(usize::try_from(n_bytes).ok()?..)?;
        Some(())
    }

    fn structure(&mut self, depth: usize) -> Option<()> {
        if depth > MOST_DEPTH {
            return None;
        }
        loop {
            let head = self.byte()?;
            if head == 0 {
                return Some(());
            }
            // A field's number is a step from the last one's, or stands by itself.
            if head >> 4 == 0 {
                self.varint()?;
            }
            // The value of a bool is in the head.
            if !matches!(head & 0x0f, 1 | 2) {
                self.value(head & 0x0f, depth)?;
            }
        }
    }

    fn value(&mut self, kind: u8, depth: usize) -> Option<()> {
        match kind {
            1..=3 => self.pass(1),
            4..=6 => self.varint().map(drop),
            7 => self.pass(8),
            8 => self.varint().and_then(|n_bytes| self.pass(n_bytes)),
            9 | 10 => self.list(depth),
            12 => self.structure(depth + 1),
            _ => None, // parquet has no maps
        }
    }

    fn list(&mut self, depth: usize) -> Option<()> {
        let head = self.byte()?;
        let n_elems = match head >> 4 {
            15 => self.varint()?,
            n => u64::from(n),
        };
        // Each element has at least a byte.
        if n_elems > self.rest.len() as u64 || depth > MOST_DEPTH {
            return None;
        }
        (0..n_elems).try_for_each(|_| self.value(head & 0x0f, depth + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::is_plausible;

    #[test]
    fn lists_and_strings_fit_or_are_refused() {
        // Field 1, a list of two bytes; field 2, a string of one; the end.
        assert!(is_plausible(&[0x19, 0x23, 1, 2, 0x18, 1, b'a', 0]));
        assert!(!is_plausible(&[0x19, 0xf3, 0xff, 0xff, 0xff, 0x7f, 1, 2, 0]));
        assert!(!is_plausible(&[0x18, 9, b'a', 0]));
        assert!(!is_plausible(&[0x1c].repeat(100)));
        assert!(!is_plausible(&[]));
    }
}
