//! What is asked of JSON here: one pass over its events, and a string at a place.

use json_event_parser::{JsonEvent, SliceJsonParser};
use std::borrow::Cow;

/// Where the text is wrong, and how.
pub(super) type Fault = (u64, String);

/// The events of one JSON value.
pub(super) struct Events<'a> {
    parser: SliceJsonParser<'a>,
}

impl<'a> Events<'a> {
    pub(super) fn new(text: &'a [u8]) -> Self {
        Self { parser: SliceJsonParser::new(text) }
    }

    pub(super) fn next(&mut self) -> Result<JsonEvent<'a>, Fault> {
        self.parser.parse_next().map_err(|error| {
            (error.location().start.offset, format!("not JSON: {}", error.message()))
        })
    }

    /// Passes one value, whatever it is.
    pub(super) fn skip(&mut self) -> Result<(), Fault> {
        let mut depth = 0u64;
        loop {
            match self.next()? {
                JsonEvent::StartArray | JsonEvent::StartObject => depth += 1,
                JsonEvent::EndArray | JsonEvent::EndObject => depth -= 1,
                JsonEvent::Eof => return Err((0, "not JSON: it ends early".into())),
                _ => {}
            }
            if depth == 0 {
                return Ok(());
            }
        }
    }

    pub(super) fn start_object(&mut self, what: &str) -> Result<(), Fault> {
        match self.next()? {
            JsonEvent::StartObject => Ok(()),
            _ => Err((0, format!("{what} is no object"))),
        }
    }

    /// The next key of an object, none at its end.
    pub(super) fn key(&mut self) -> Result<Option<Cow<'a, str>>, Fault> {
        match self.next()? {
            JsonEvent::ObjectKey(key) => Ok(Some(key)),
            _ => Ok(None),
        }
    }

    pub(super) fn string(&mut self, what: &str) -> Result<Cow<'a, str>, Fault> {
        match self.next()? {
            JsonEvent::String(text) => Ok(text),
            _ => Err((0, format!("{what} is no string"))),
        }
    }

    /// An array of numbers that are whole and not negative.
    pub(super) fn naturals(&mut self, what: &str) -> Result<Vec<u64>, Fault> {
        let fault = || (0, format!("{what} is no array of whole numbers"));
        let mut numbers = Vec::new();
        match self.next()? {
            JsonEvent::StartArray => {}
            _ => return Err(fault()),
        }
        loop {
            match self.next()? {
                JsonEvent::Number(number) => numbers.push(number.parse().map_err(|_| fault())?),
                JsonEvent::EndArray => return Ok(numbers),
                _ => return Err(fault()),
            }
        }
    }

    /// Nothing may follow.
    pub(super) fn end(&mut self) -> Result<(), Fault> {
        match self.next()? {
            JsonEvent::Eof => Ok(()),
            _ => Err((0, "more than one value".into())),
        }
    }
}

/// The string that `text`, one object, has at the key `field`.
pub(super) fn string_field(text: &[u8], field: &str) -> Result<String, Fault> {
    let mut events = Events::new(text);
    let mut found = None;
    events.start_object("the line")?;
    while let Some(key) = events.key()? {
        if key != field {
            events.skip()?;
        } else if found.replace(events.string(&format!("`{field}`"))?.into_owned()).is_some() {
            return Err((0, format!("`{field}` is there twice")));
        }
    }
    events.end()?;
    found.ok_or_else(|| (0, format!("no field `{field}`")))
}

/// The keys of `text`, one object, in their order.
pub(super) fn keys(text: &[u8]) -> Result<Vec<String>, Fault> {
    let (mut events, mut keys) = (Events::new(text), Vec::new());
    events.start_object("the line")?;
    while let Some(key) = events.key()? {
        keys.push(key.into_owned());
        events.skip()?;
    }
    events.end()?;
    Ok(keys)
}
