//! Filters on lists and mappings.

use std::cmp::Ordering;

use super::arguments::{Bound, Given};
use super::eval::started;
use super::run::Run;
use super::text::escape;
use super::value::{Entry, Text};
use super::{Failure, Fallible, Value, refused};

impl<'v> Run<'v> {
    pub(super) fn list_filter(&mut self, name: &str, of: Value<'v>, arguments: Given<'v>) -> Fallible<Value<'v>> {
        match name {
            "first" | "last" => {
                arguments.none()?;
                self.end(&of, name == "last")
            }
            "list" => {
                arguments.none()?;
                let items = self.items(&of)?;
                self.room_for_items(items.len())?;
                Ok(Value::list(items.iter().collect()))
            }
            "reverse" => {
                arguments.none()?;
                match &of {
                    Value::Text(_) => self.slice(&of, [None, None, Some(-1)]),
                    other => {
                        let items = self.items(other)?;
                        self.room_for_items(items.len())?;
                        Ok(Value::iterator(items.iter().rev().collect()))
                    }
                }
            }
            "select" | "reject" | "selectattr" | "rejectattr" => self.selected(name, &of, arguments),
            "map" => self.map(&of, arguments),
            "sort" => self.sort(&of, arguments),
            "unique" => self.unique(&of, arguments),
            "min" | "max" => self.extreme(&of, name == "max", arguments),
            "sum" => self.sum(&of, arguments),
            "dictsort" => self.dictsort(&of, arguments),
            "groupby" => self.group_by(&of, arguments),
            "batch" | "slice" => self.portions(&of, name == "batch", arguments),
            "xmlattr" => self.xml_attributes(&of, arguments),
            _ => refused(format!("No filter named '{name}'.")),
        }
    }

    fn end(&mut self, of: &Value<'v>, is_last: bool) -> Fallible<Value<'v>> {
        let found = match of {
            Value::Iterator(generator) if !is_last => started(generator)?.items.borrow_mut().pop_front(),
            Value::Iterator(_) => return refused("a generator is not reversible"),
            Value::Text(text) => {
                let char = if is_last { text.char_indices().next_back() } else { text.char_indices().next() };
                char.map(|(at, char)| Value::Text(text.part(at..at + char.len_utf8()).markup(false)))
            }
            other => {
                let items = self.items(other)?;
                if is_last { items.len().checked_sub(1).and_then(|at| items.get(at)) } else { items.get(0) }
            }
        };
        Ok(found.unwrap_or(Value::Undefined))
    }

    /// Returns an attribute of an item, given a path such as `a.b.0`.
    pub(super) fn attribute_path(&mut self, of: &Value<'v>, path: &Value<'v>) -> Fallible<Value<'v>> {
        let Value::Text(path) = path else { return self.item(of, path) };
        let mut value = of.clone();
        for part in path.split('.') {
            let key = match part.parse::<i128>() {
                Ok(index) if part.bytes().all(|byte| byte.is_ascii_digit()) => Value::Int(index),
                _ => Value::text(part.to_owned()),
            };
            value = self.item(&value, &key)?;
        }
        Ok(value)
    }

    /// Implements `select(test, ...)`, `selectattr(attribute, test, ...)` and their opposites.
    fn selected(&mut self, name: &str, of: &Value<'v>, mut arguments: Given<'v>) -> Fallible<Value<'v>> {
        // Jinja2 does not check the arguments if the list is empty.
        if !of.is_true() {
            return Ok(Value::iterator(Vec::new()));
        }
        let attribute = if name.ends_with("attr") {
            if arguments.values.is_empty() {
                return refused("Missing parameter for attribute name");
            }
            Some(arguments.values.remove(0))
        } else {
            None
        };
        let test = if arguments.values.is_empty() { None } else { Some(arguments.values.remove(0)) };
        let wanted = name.starts_with("select");
        let mut kept = Vec::new();
        let items = self.items(of)?;
        for item in items.iter() {
            let tested = match &attribute {
                Some(attribute) => self.attribute_path(&item, attribute)?,
                None => item.clone(),
            };
            let is = match &test {
                Some(Value::Text(test)) => self.test(test, &tested, arguments.clone())?,
                Some(_) => return refused("a test must be named"),
                None => tested.is_true(),
            };
            if is == wanted {
                kept.push(item);
            }
        }
        self.room_for_items(items.len())?;
        Ok(Value::iterator(kept))
    }

    fn map(&mut self, of: &Value<'v>, mut arguments: Given<'v>) -> Fallible<Value<'v>> {
        if !of.is_true() {
            return Ok(Value::iterator(Vec::new()));
        }
        let items = self.items(of)?;
        self.room_for_items(items.len())?;
        let mut mapped = Vec::new();
        if arguments.values.is_empty() {
            let [attribute, default] = arguments.bind(["attribute", "default"])?;
            let attribute = attribute.required("attribute")?;
            let default = default.any();
            for item in items.iter() {
                let value = self.attribute_path(&item, &attribute)?;
                mapped.push(match (value, &default) {
                    (Value::Undefined, Some(default)) => default.clone(),
                    (value, _) => value,
                });
            }
        } else {
            let Value::Text(filter) = arguments.values.remove(0) else { return refused("a filter must be named") };
            for item in items.iter() {
                self.deeper()?;
                mapped.push(self.apply(&filter, item, arguments.clone())?);
                self.depth -= 1;
            }
        }
        self.made_list(Value::iterator(mapped))
    }

    /// Returns the sort key of an item: the item or its attribute, with strings lower-cased if case is ignored.
    fn key_of(&mut self, item: &Value<'v>, attribute: Option<&Value<'v>>, case: bool) -> Fallible<Value<'v>> {
        let key = match attribute {
            Some(attribute) => self.attribute_path(item, attribute)?,
            None => item.clone(),
        };
        self.folded(key, case)
    }

    fn folded(&mut self, key: Value<'v>, case: bool) -> Fallible<Value<'v>> {
        match key {
            Value::Text(text) if !case => self.made(text.to_lowercase()),
            key => Ok(key),
        }
    }

    /// Sorts stably; stops at the first failure.
    pub(super) fn sort_by<T>(
        &mut self,
        items: &mut [T],
        order: impl Fn(&mut Self, &T, &T) -> Fallible<Option<Ordering>>,
    ) -> Fallible<()> {
        let mut failure: Option<Failure> = None;
        items.sort_by(|a, b| {
            if failure.is_some() {
                return Ordering::Equal;
            }
            match order(self, a, b) {
                Ok(order) => order.unwrap_or(Ordering::Equal),
                Err(error) => {
                    failure = Some(error);
                    Ordering::Equal
                }
            }
        });
        failure.map_or(Ok(()), Err)
    }

    /// Sorts, possibly by several attributes.
    fn sort(&mut self, of: &Value<'v>, arguments: Given<'v>) -> Fallible<Value<'v>> {
        let [reverse, case, attribute] = arguments.bind(["reverse", "case_sensitive", "attribute"])?;
        let (reverse, case) = (reverse.truth(false), case.truth(false));
        let attributes: Vec<Value<'v>> = match attribute.given() {
            Some(Value::Text(names)) => names.split(',').map(|name| Value::text(name.to_owned())).collect(),
            Some(other) => vec![other],
            None => Vec::new(),
        };
        let items = self.items(of)?;
        self.room_for_items(items.len().saturating_mul(2))?;
        let mut keyed = Vec::new();
        for item in items.iter() {
            let key = match attributes.as_slice() {
                [] => self.key_of(&item, None, case)?,
                several => {
                    let mut keys = Vec::new();
                    for attribute in several {
                        keys.push(self.key_of(&item, Some(attribute), case)?);
                    }
                    Value::list(keys)
                }
            };
            keyed.push(Entry { key, value: item });
        }
        self.sorted(keyed, reverse)
    }

    /// Returns the values of entries, sorted by their keys.
    fn sorted(&mut self, mut entries: Vec<Entry<'v>>, reverse: bool) -> Fallible<Value<'v>> {
        self.sort_entries(&mut entries, reverse)?;
        Ok(Value::list(entries.into_iter().map(|entry| entry.value).collect()))
    }

    fn sort_entries(&mut self, entries: &mut [Entry<'v>], reverse: bool) -> Fallible<()> {
        self.sort_by(entries, |run, a, b| {
            let order = run.order(&a.key, &b.key)?;
            Ok(order.map(|order| if reverse { order.reverse() } else { order }))
        })
    }

    /// Returns items with their comparison keys, for `unique`, `min` and `max`.
    fn keyed(&mut self, of: &Value<'v>, arguments: Given<'v>) -> Fallible<Vec<Entry<'v>>> {
        let [case, attribute] = arguments.bind(["case_sensitive", "attribute"])?;
        let (attribute, case) = (attribute.given(), case.truth(false));
        let items = self.items(of)?;
        self.room_for_items(2 * items.len())?;
        let entry = |value: Value<'v>| Ok(Entry { key: self.key_of(&value, attribute.as_ref(), case)?, value });
        items.iter().map(entry).collect()
    }

    fn unique(&mut self, of: &Value<'v>, arguments: Given<'v>) -> Fallible<Value<'v>> {
        let mut seen = Vec::new();
        let mut kept = Vec::new();
        for Entry { key, value } in self.keyed(of, arguments)? {
            let known = seen.len();
            self.insert(&mut seen, Entry { key, value: Value::None })?;
            if seen.len() > known {
                kept.push(value);
            }
        }
        Ok(Value::iterator(kept))
    }

    fn extreme(&mut self, of: &Value<'v>, is_max: bool, arguments: Given<'v>) -> Fallible<Value<'v>> {
        let mut best: Option<Entry<'v>> = None;
        for entry in self.keyed(of, arguments)? {
            let is_better = match &best {
                None => true,
                Some(best) => {
                    let order = self.order(&entry.key, &best.key)?;
                    order == Some(if is_max { Ordering::Greater } else { Ordering::Less })
                }
            };
            if is_better {
                best = Some(entry);
            }
        }
        Ok(best.map_or(Value::Undefined, |best| best.value))
    }

    fn sum(&mut self, of: &Value<'v>, arguments: Given<'v>) -> Fallible<Value<'v>> {
        let [attribute, start] = arguments.bind(["attribute", "start"])?;
        let attribute = attribute.given();
        let mut sum = start.any().unwrap_or(Value::Int(0));
        if matches!(sum, Value::Text(_)) {
            return refused("sum() can't sum strings");
        }
        for item in self.items(of)?.iter() {
            let item = match &attribute {
                Some(attribute) => self.attribute_path(&item, attribute)?,
                None => item,
            };
            sum = self.add(sum, item)?;
        }
        Ok(sum)
    }

    fn dictsort(&mut self, of: &Value<'v>, arguments: Given<'v>) -> Fallible<Value<'v>> {
        let [case, by, reverse] = arguments.bind(["case_sensitive", "by", "reverse"])?;
        let (case, by, reverse) = (case.truth(false), by.text("key")?, reverse.truth(false));
        let Value::Map(map) = of else { return refused(format!("dictsort of {}", of.type_name())) };
        self.room_for_items(map.len().saturating_mul(4))?;
        let mut keyed = Vec::new();
        for entry in map.entries() {
            let key = match &*by {
                "key" => entry.key.clone(),
                "value" => entry.value.clone(),
                _ => return refused("You can only sort by either \"key\" or \"value\""),
            };
            let key = self.folded(key, case)?;
            keyed.push(Entry { key, value: Value::tuple(vec![entry.key, entry.value]) });
        }
        self.sorted(keyed, reverse)
    }

    /// Returns pairs of a key and its items.
    fn group_by(&mut self, of: &Value<'v>, arguments: Given<'v>) -> Fallible<Value<'v>> {
        let [attribute, default, case] = arguments.bind(["attribute", "default", "case_sensitive"])?;
        let (attribute, default) = (attribute.required("attribute")?, default.given());
        let case = case.truth(false);
        let mut keyed = Vec::new();
        for item in self.items(of)?.iter() {
            let key = match (self.attribute_path(&item, &attribute)?, &default) {
                (Value::Undefined, Some(default)) => default.clone(),
                (key, _) => key,
            };
            let folded = self.folded(key.clone(), case)?;
            self.room_for_items(4)?;
            keyed.push(Entry { key: folded, value: Value::tuple(vec![key, item]) });
        }
        self.sort_entries(&mut keyed, false)?;
        let mut groups: Vec<Value<'v>> = Vec::new();
        let mut group: Vec<Value<'v>> = Vec::new();
        let mut names: Option<Entry<'v>> = None;
        for entry in keyed {
            let Value::List(pair) = &entry.value else { continue };
            let (first, item) = (pair.get(0).unwrap_or(Value::Undefined), pair.get(1).unwrap_or(Value::Undefined));
            let is_same = match &names {
                Some(names) => self.equal(&names.key, &entry.key)?,
                None => false,
            };
            if !is_same && let Some(names) = names.replace(Entry { key: entry.key.clone(), value: first }) {
                groups.push(Value::tuple(vec![names.value, Value::list(std::mem::take(&mut group))]));
            }
            group.push(item);
        }
        if let Some(names) = names {
            groups.push(Value::tuple(vec![names.value, Value::list(group)]));
        }
        self.made_list(Value::list(groups))
    }

    /// Implements `batch(size)`, which makes lists of that size, and `slice(count)`, which makes that many lists.
    fn portions(&mut self, of: &Value<'v>, is_batch: bool, arguments: Given<'v>) -> Fallible<Value<'v>> {
        let [count, fill] = arguments.bind([if is_batch { "linecount" } else { "slices" }, "fill_with"])?;
        let count = usize::try_from(count.required("count")?.whole("count")?).unwrap_or(0);
        if count == 0 {
            return refused("expected a count of at least one");
        }
        let fill = Bound::given(fill);
        let items: Vec<_> = self.items(of)?.iter().collect();
        self.room_for_items(items.len().saturating_add(count).saturating_mul(2))?;
        let mut portions: Vec<Vec<Value<'v>>> = Vec::new();
        if is_batch {
            portions = items.chunks(count).map(<[Value<'v>]>::to_vec).collect();
            if let (Some(last), Some(fill)) = (portions.last_mut(), fill) {
                last.resize(count, fill);
            }
        } else {
            let (size, more) = (items.len() / count, items.len() % count);
            let mut rest = items.as_slice();
            for at in 0..count {
                let (portion, after) = rest.split_at(size + usize::from(at < more));
                rest = after;
                let mut portion = portion.to_vec();
                if let Some(fill) = fill.as_ref().filter(|_| at >= more) {
                    portion.push(fill.clone());
                }
                portions.push(portion);
            }
        }
        self.made_list(Value::iterator(portions.into_iter().map(Value::list).collect()))
    }

    fn xml_attributes(&mut self, of: &Value<'v>, arguments: Given<'v>) -> Fallible<Value<'v>> {
        let [space] = arguments.bind(["autospace"])?;
        let space = space.truth(true);
        let Value::Map(map) = of else { return refused("xmlattr takes a mapping") };
        let mut written = Vec::new();
        for entry in map.entries() {
            if matches!(entry.value, Value::None | Value::Undefined) {
                continue;
            }
            let (key, value) = (self.text_of(&entry.key)?, self.text_of(&entry.value)?);
            if key.contains(|char: char| super::text::is_space(char) || matches!(char, '/' | '>' | '=')) {
                return refused("invalid character in an attribute name");
            }
            self.room((key.len() + value.len()).saturating_mul(5))?;
            let escaped = |text: &Text<'v>| if text.is_markup { text.to_string() } else { escape(text) };
            written.push(format!("{}=\"{}\"", escaped(&key), escaped(&value)));
        }
        let joined = written.join(" ");
        let lead = if space && !joined.is_empty() { " " } else { "" };
        Ok(Value::text(format!("{lead}{joined}")))
    }
}
