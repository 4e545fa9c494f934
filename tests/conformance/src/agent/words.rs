//! Commands in words: `open m DESCRIPTOR timeout=500` is [`Command::Open`](super::Command::Open).
//!
//! The first word names the variant. The next words are its fields in their order; `field=value` sets a field out of order,
//! and fields with a default may be left out. Times are in milliseconds. `stream:0` is a variant with a value. A list
//! takes all remaining words, or one word with commas.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Display;
use std::time::Duration;

use serde::de::value::{Error, MapDeserializer, SeqDeserializer};
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, Error as _, IntoDeserializer, MapAccess,
    VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;

/// Parses a command. Returns `None` if the first word names no variant of `T`.
///
/// # Errors
///
/// An error if the other words are not the variant's fields.
pub fn parse<T: DeserializeOwned>(text: &str) -> Result<Option<T>, Error> {
    let mut positional = VecDeque::new();
    let mut keyed = BTreeMap::new();
    let mut words = text.split_whitespace();
    let variant = words.next().unwrap_or_default();
    for word in words {
        match word.split_once('=') {
            Some((key, value)) => drop(keyed.insert(key, value)),
            None => positional.push_back(word),
        }
    }
    let mut known = true;
    let words = Words { variant, positional, keyed, known: &mut known };
    match T::deserialize(words) {
        Err(_) if !known => Ok(None),
        result => result.map(Some).map_err(|error| Error::custom(format_args!("{variant}: {error}"))),
    }
}

struct Words<'a, 'k> {
    variant: &'a str,
    positional: VecDeque<&'a str>,
    keyed: BTreeMap<&'a str, &'a str>,
    known: &'k mut bool,
}

impl<'de> Deserializer<'de> for Words<'de, '_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
        Err(Error::custom("words are a command, which is an enum"))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        *self.known = variants.contains(&self.variant);
        visitor.visit_enum(self)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct newtype_struct seq
        tuple tuple_struct map struct identifier ignored_any
    }
}

impl<'de> EnumAccess<'de> for Words<'de, '_> {
    type Error = Error;
    type Variant = Fields<'de>;

    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, Fields<'de>), Error> {
        let variant = seed.deserialize(self.variant.into_deserializer())?;
        Ok((variant, Fields { names: [].iter(), positional: self.positional, keyed: self.keyed, next: None }))
    }
}

/// The words behind the first, as the fields of a variant or of the struct in it.
struct Fields<'a> {
    names: std::slice::Iter<'static, &'static str>,
    positional: VecDeque<&'a str>,
    keyed: BTreeMap<&'a str, &'a str>,
    /// The value of the field that was named last, unless it is positional.
    next: Option<&'a str>,
}

impl<'a> Fields<'a> {
    fn finish(&self) -> Result<(), Error> {
        match self.positional.front().or_else(|| self.keyed.keys().next()) {
            None => Ok(()),
            Some(word) => Err(Error::custom(format_args!("unexpected {word:?}"))),
        }
    }

    fn visit<V: Visitor<'a>>(
        mut self,
        names: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.names = names.iter();
        visitor.visit_map(self)
    }
}

impl<'de> VariantAccess<'de> for Fields<'de> {
    type Error = Error;

    fn unit_variant(self) -> Result<(), Error> {
        self.finish()
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, Error> {
        seed.deserialize(self)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, _: V) -> Result<V::Value, Error> {
        Err(Error::custom("a command has named fields"))
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        names: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.visit(names, visitor)
    }
}

impl<'de> Deserializer<'de> for Fields<'de> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
        Err(Error::custom("a variant without named fields holds a struct"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        names: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.visit(names, visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct newtype_struct seq
        tuple tuple_struct map enum identifier ignored_any
    }
}

impl<'de> MapAccess<'de> for Fields<'de> {
    type Error = Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, Error> {
        for name in self.names.by_ref() {
            self.next = self.keyed.remove(name);
            if self.next.is_some() || !self.positional.is_empty() {
                return seed.deserialize(name.into_deserializer()).map(Some);
            }
        }
        self.finish().map(|()| None)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Error> {
        seed.deserialize(Value { word: self.next.take(), rest: &mut self.positional })
    }
}

/// The value of a field: a word, or the next of the words in order.
struct Value<'a, 'r> {
    word: Option<&'a str>,
    rest: &'r mut VecDeque<&'a str>,
}

impl<'a> Value<'a, '_> {
    fn word(self) -> Result<&'a str, Error> {
        self.word.or_else(|| self.rest.pop_front()).ok_or_else(|| Error::custom("a word is missing"))
    }

    fn parse<T: std::str::FromStr<Err: Display>>(self) -> Result<T, Error> {
        let word = self.word()?;
        word.parse().map_err(|error| Error::custom(format_args!("{word:?}: {error}")))
    }
}

macro_rules! numbers {
    ($($method:ident $visit:ident;)*) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            visitor.$visit(self.parse()?)
        })*
    };
}

impl<'de> Deserializer<'de> for Value<'de, '_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_borrowed_str(self.word()?)
    }

    numbers! {
        deserialize_u8 visit_u8;
        deserialize_u16 visit_u16;
        deserialize_u32 visit_u32;
        deserialize_u64 visit_u64;
        deserialize_i32 visit_i32;
        deserialize_i64 visit_i64;
        deserialize_f32 visit_f32;
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_bool(self.parse::<u8>()? != 0)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let words: Vec<_> = match self.word {
            Some(list) => list.split(',').collect(),
            None => self.rest.drain(..).collect(),
        };
        visitor.visit_seq(SeqDeserializer::new(words.into_iter()))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        if name != "Duration" {
            return Err(Error::custom(format_args!("{name} cannot be written as a word")));
        }
        let time = Duration::from_millis(self.parse()?);
        visitor.visit_seq(SeqDeserializer::new([time.as_secs(), time.subsec_nanos().into()].into_iter()))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        let word = self.word()?;
        match word.split_once(':') {
            None => visitor.visit_enum(word.into_deserializer()),
            Some((variant, value)) => {
                let value: u32 = value.parse().map_err(Error::custom)?;
                let pair = MapDeserializer::new([(variant, value)].into_iter());
                visitor.visit_enum(serde::de::value::MapAccessDeserializer::new(pair))
            }
        }
    }

    forward_to_deserialize_any! {
        i8 i16 f64 char str string bytes byte_buf unit unit_struct tuple tuple_struct map identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Command, Place};
    use super::parse;

    fn command(text: &str) -> Command {
        parse(text).expect("the words are its fields").expect("the first word names a variant")
    }

    #[test]
    fn words_of_command_become_its_fields() {
        let wait = command("wait-now t 7 timeout=1500");
        assert!(
            matches!(&wait, Command::WaitNow { name, value: 7, timeout } if name == "t" && timeout.as_millis() == 1500)
        );
        let drop = command("drop a b c");
        assert!(matches!(&drop, Command::Drop { names } if *names == ["a", "b", "c"]));
        let send = command("send c 5 20000 of=x ready-on=0 drops=1");
        assert!(matches!(
            &send,
            Command::Send { len: 5, of, drops: true, ready_on: Some(0), bytes: None, .. } if *of == ["x"]
        ));
        let open = command("open-received m x place=stream:1");
        assert!(matches!(open, Command::OpenReceived { place: Some(Place::Stream(1)), index: 0, .. }));
    }

    #[test]
    fn words_that_fit_no_field_are_rejected() {
        assert!(parse::<Command>("frobnicate x").expect("no error").is_none());
        for wrong in ["free", "free x y", "free x colour=blue", "signal t many", "nothing more"] {
            assert!(parse::<Command>(wrong).is_err(), "{wrong}");
        }
    }
}
