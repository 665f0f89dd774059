//! Formats dates like `strftime` in the C locale.

use std::fmt::Write as _;

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const SECONDS_A_DAY: i64 = 86_400;

/// A date and time of day.
struct Date {
    year: i64,
    month: i64,
    day: i64,
    /// Days since the first of January.
    day_of_year: i64,
    /// Day of the week; 0 is Sunday.
    weekday: i64,
    second: i64,
}

impl Date {
    /// Converts seconds since 1970.
    fn of(seconds: i64) -> Self {
        let days = seconds.div_euclid(SECONDS_A_DAY);
        // Years begin in March here, so that the leap day is the last one; eras have 400 years.
        let shifted = days + 719_468;
        let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
        let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        let is_leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
        let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
        let month_index = usize::try_from(month - 1).unwrap_or(0);
        let day_of_year = before[month_index] + day - 1 + i64::from(is_leap && month > 2);
        let weekday = (days + 4).rem_euclid(7);
        Self { year, month, day, day_of_year, weekday, second: seconds.rem_euclid(SECONDS_A_DAY) }
    }

    /// The name of a day or month, in full or its first three letters.
    fn name(names: &[&'static str], at: i64, is_short: bool) -> &'static str {
        let name = usize::try_from(at).ok().and_then(|at| names.get(at)).copied().unwrap_or_default();
        if is_short { &name[..3] } else { name }
    }
}

/// Formats a time given in seconds since 1970.
pub(super) fn strftime(format: &str, seconds: i64) -> String {
    let date = Date::of(seconds);
    let mut out = String::with_capacity(format.len() * 2);
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        let mut after = rest[at + 1..].chars();
        let mut directive = after.next();
        let is_bare = directive == Some('-');
        if is_bare {
            directive = after.next();
        }
        match directive {
            None => out.push_str(&rest[at..]),
            Some(directive) => {
                if !write(&date, directive, is_bare, &mut out) {
                    out.push_str(&rest[at..rest.len() - after.as_str().len()]);
                }
            }
        }
        rest = after.as_str();
    }
    out.push_str(rest);
    out
}

/// Writes a directive; returns whether it exists.
fn write(date: &Date, directive: char, is_bare: bool, out: &mut String) -> bool {
    let (hour, minute, second) = (date.second / 3600, date.second / 60 % 60, date.second % 60);
    let hour12 = (hour + 11) % 12 + 1;
    let mut number = |number: i64, width: usize| {
        let width = if is_bare { 0 } else { width };
        let _ = write!(out, "{number:0width$}");
    };
    match directive {
        'Y' => number(date.year, 0),
        'm' => number(date.month, 2),
        'd' => number(date.day, 2),
        'H' => number(hour, 2),
        'I' => number(hour12, 2),
        'M' => number(minute, 2),
        'S' => number(second, 2),
        'f' => number(0, 6),
        'y' => number(date.year.rem_euclid(100), 2),
        'C' => number(date.year.div_euclid(100), 2),
        'j' => number(date.day_of_year + 1, 3),
        'w' => number(date.weekday, 1),
        'u' => number((date.weekday + 6) % 7 + 1, 1),
        'U' => number((date.day_of_year + 7 - date.weekday) / 7, 2),
        'W' => number((date.day_of_year + 7 - (date.weekday + 6) % 7) / 7, 2),
        _ => return write_text(date, directive, out),
    }
    true
}

fn write_text(date: &Date, directive: char, out: &mut String) -> bool {
    let hour = date.second / 3600;
    let all = |format: &str, out: &mut String| {
        for directive in format.chars() {
            if directive.is_ascii_alphabetic() {
                write(date, directive, false, out);
            } else {
                out.push(directive);
            }
        }
    };
    match directive {
        'B' => out.push_str(Date::name(&MONTHS, date.month - 1, false)),
        'b' | 'h' => out.push_str(Date::name(&MONTHS, date.month - 1, true)),
        'A' => out.push_str(Date::name(&DAYS, date.weekday, false)),
        'a' => out.push_str(Date::name(&DAYS, date.weekday, true)),
        'p' => out.push_str(if hour < 12 { "AM" } else { "PM" }),
        'e' | 'k' | 'l' => {
            let number = match directive {
                'e' => date.day,
                'k' => hour,
                _ => (hour + 11) % 12 + 1,
            };
            let _ = write!(out, "{number:2}");
        }
        'D' | 'x' => all("m/d/y", out),
        'F' => all("Y-m-d", out),
        'T' | 'X' => all("H:M:S", out),
        'R' => all("H:M", out),
        'r' => all("I:M:S p", out),
        'c' => {
            out.push_str(Date::name(&DAYS, date.weekday, true));
            all(" b e H:M:S Y", out);
        }
        'n' => out.push('\n'),
        't' => out.push('\t'),
        '%' => out.push('%'),
        // A time without a zone has no name and no offset.
        'Z' | 'z' => {}
        _ => return false,
    }
    true
}
