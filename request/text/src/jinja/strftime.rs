//! Formats dates like Python's `strftime` in the C locale.

use chrono::DateTime;
use chrono::format::{Fixed, Item, Numeric, StrftimeItems};

/// Formats a time given in Unix seconds; returns an empty string outside chrono's range.
pub(super) fn strftime(format: &str, seconds: i64) -> String {
    let Some(time) = DateTime::from_timestamp(seconds, 0) else { return String::new() };
    // In Python `%f` is microseconds, and `%Z` and `%z` are empty for a time without a zone.
    let items = StrftimeItems::new_lenient(format).map(|item| match item {
        Item::Numeric(Numeric::Nanosecond, _) => Item::Literal("000000"),
        Item::Fixed(Fixed::TimezoneName | Fixed::TimezoneOffset) => Item::Literal(""),
        item => item,
    });
    time.format_with_items(items).to_string()
}
