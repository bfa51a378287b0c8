//! Values of a Hugging Face `config.json`, without a JSON library.
//!
//! Whoever parses JSON makes an [`HfValue`] of its value, which is a match of seven arms, and gives it
//! to a configuration's `from_hf`; `to_hf` is the way back.

use crate::error::{Error, Result};
use std::{collections::BTreeMap, fmt};

/// A JSON value.
#[derive(Clone, Debug, PartialEq)]
pub enum HfValue {
    /// `null`, which counts as absent.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A number without a fraction.
    Int(i64),
    /// Any other number.
    Float(f64),
    /// A string.
    Text(String),
    /// An array.
    List(Vec<HfValue>),
    /// An object.
    Map(BTreeMap<String, HfValue>),
}

impl HfValue {
    /// An object of these fields.
    pub fn map<const N: usize>(fields: [(&str, HfValue); N]) -> Self {
        Self::Map(fields.into_iter().map(|(name, value)| (name.to_string(), value)).collect())
    }

    /// The field `name` of an object, unless it is absent or null.
    pub fn get(&self, name: &str) -> Option<&HfValue> {
        match self {
            Self::Map(fields) => fields.get(name).filter(|value| **value != Self::Null),
            _ => None,
        }
    }

    /// The number, of either kind.
    pub(crate) fn number(&self) -> Option<f64> {
        match *self {
            Self::Int(x) => Some(x as f64),
            Self::Float(x) => Some(x),
            _ => None,
        }
    }

    /// The size `name`, at least 0.
    pub(crate) fn size(&self, name: &str) -> Result<usize> {
        self.size_or(name, None)
    }

    /// As [`HfValue::size`], with a value for an absent field.
    pub(crate) fn size_or(&self, name: &str, default: Option<usize>) -> Result<usize> {
        match (self.get(name), default) {
            (None, Some(default)) => Ok(default),
            (Some(&Self::Int(x)), _) if x >= 0 => Ok(x as usize),
            (found, _) => Err(refuse(name, found, "a whole number of at least 0")),
        }
    }

    /// The number `name`, or `default` where it is absent.
    pub(crate) fn number_or(&self, name: &str, default: f64) -> Result<f64> {
        match self.get(name) {
            None => Ok(default),
            Some(found) => found.number().ok_or_else(|| refuse(name, Some(found), "a number")),
        }
    }

    /// The flag `name`, or `default` where it is absent.
    pub(crate) fn flag_or(&self, name: &str, default: bool) -> Result<bool> {
        match self.get(name) {
            None => Ok(default),
            Some(&Self::Bool(x)) => Ok(x),
            found => Err(refuse(name, found, "true or false")),
        }
    }

    /// Refuses a text field that is neither absent nor one of `known`.
    pub(crate) fn one_of(&self, name: &str, known: &[&str]) -> Result<()> {
        match self.get(name) {
            None => Ok(()),
            Some(Self::Text(text)) if known.contains(&text.as_str()) => Ok(()),
            found => Err(refuse(name, found, &format!("absent or one of {known:?}"))),
        }
    }
}

/// The error of a field that holds something else.
pub(crate) fn refuse(name: &str, found: Option<&HfValue>, expected: &str) -> Error {
    let found = found.map_or_else(|| "absent".to_string(), HfValue::to_string);
    Error::Field { name: name.to_string(), found, expected: expected.to_string() }
}

impl fmt::Display for HfValue {
    /// As JSON, with strings escaped as Rust does.
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Null => write!(f, "null"),
            Self::Bool(x) => write!(f, "{x}"),
            Self::Int(x) => write!(f, "{x}"),
            Self::Float(x) => write!(f, "{x:?}"),
            Self::Text(x) => write!(f, "{x:?}"),
            Self::List(items) => {
                let items: Vec<String> = items.iter().map(Self::to_string).collect();
                write!(f, "[{}]", items.join(", "))
            }
            Self::Map(fields) => {
                let fields = fields.iter().map(|(name, value)| format!("{name:?}: {value}"));
                write!(f, "{{{}}}", fields.collect::<Vec<_>>().join(", "))
            }
        }
    }
}

impl From<usize> for HfValue {
    fn from(x: usize) -> Self {
        i64::try_from(x).map_or(Self::Float(x as f64), Self::Int)
    }
}

impl From<f64> for HfValue {
    fn from(x: f64) -> Self {
        Self::Float(x)
    }
}

impl From<bool> for HfValue {
    fn from(x: bool) -> Self {
        Self::Bool(x)
    }
}

impl From<&str> for HfValue {
    fn from(x: &str) -> Self {
        Self::Text(x.to_string())
    }
}
