"""A query in words, in English or Chinese: names of tables and columns as the tables have them, one sentence for each form.

A language model may paraphrase what stands here; the SQL stays what decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from longspan.evaluation.tables.pool import Database, Value, is_key
from longspan.evaluation.tables.queries import Condition, Having, Item, Join, Query, Ref
from longspan.evaluation.tables.serialise import written


@dataclass(frozen=True)
class Language:
    """The pieces of one language."""

    quote: tuple[str, str]
    comparisons: Mapping[str, str]
    dates: Mapping[str, str]
    join: str
    where: str
    condition: str
    both: str
    forms: Mapping[str, str]
    aggregates: Mapping[str, str]
    having: str
    orders: tuple[str, str, str, str]
    """Numbers falling and rising, dates falling and rising."""
    decimals: str
    intro: str
    answer: str


ENGLISH = Language(
    quote=("`", "`"),
    comparisons={"=": "is", "<>": "is not", "<": "is less than", "<=": "is at most", ">": "is more than", ">=": "is at least"},
    dates={"=": "is", "<>": "is not", "<": "is before", "<=": "is on or before", ">": "is after", ">=": "is on or after"},
    join="Put each row of {known_table} together with the row of {new_table} whose {new} is its {known}.",
    where=" where {conditions}",
    condition="{ref} {is_} {value}",
    both=" and ",
    forms={
        "look up": "What is {what} in the row of {table}{where}?",
        "list": "List {what} for every row of {table}{where}, as often as it comes.",
        "different": "List each different value of {what} once, over the rows of {table}{where}.",
        "count": "How many rows of {table} are there{where}?",
        "aggregate": "What is {what} over the rows of {table}{where}?",
        "order": "Order the rows of {table}{where} by {by}, {most} first, and list {what} of the first {limit}, in this order.",
        "having": "Group the rows of {table}{where} by {group}. List the values of {group} for which {having}.",
        "group order": "Group the rows of {table}{where} by {group}. Order the values of {group} by {by}, {most} first, and list "
                       "the first {limit}, in this order.",
    },
    aggregates={"count": "the number of rows", "filled": "the number of cells of {ref} that aren't empty",
                "different": "the number of different values of {ref}", "sum": "the sum of {ref}", "avg": "the mean of {ref}",
                "min": "the smallest {ref}", "max": "the largest {ref}"},
    having="{what} {is_} {value}",
    orders=("largest", "smallest", "latest", "earliest"),
    decimals=" Round to {decimals} decimals.",
    intro="Answer the question at the end from these tables. Empty cells count for nothing.\n\n",
    answer=" Write the answer as a JSON list, strings in quotes, on a line that begins with \"Answer:\".",
)

CHINESE = Language(
    quote=("「", "」"),
    comparisons={"=": "等于", "<>": "不等于", "<": "小于", "<=": "至多为", ">": "大于", ">=": "至少为"},
    dates={"=": "为", "<>": "不为", "<": "早于", "<=": "不晚于", ">": "晚于", ">=": "不早于"},
    join="把表{known_table}的每一行与表{new_table}中{new}等于其{known}的那一行连接起来。",
    where="中满足{conditions}的行",
    condition="{ref}{is_}{value}",
    both="且",
    forms={
        "look up": "表{table}{where}，其{what}是什么？",
        "list": "对表{table}{where}，逐行列出{what}，重复的也要列出。",
        "different": "对表{table}{where}，列出{what}的每个不同取值，各一次。",
        "count": "表{table}{where}有多少行？",
        "aggregate": "对表{table}{where}，{what}是多少？",
        "order": "对表{table}{where}，按{by}{most}排序，依次列出前 {limit} 行的{what}。",
        "having": "对表{table}{where}，按{group}分组，列出{having}的{group}取值。",
        "group order": "对表{table}{where}，按{group}分组，再按{by}{most}排序，依次列出前 {limit} 个{group}取值。",
    },
    aggregates={"count": "行数", "filled": "{ref}非空的单元格数", "different": "{ref}的不同取值个数", "sum": "{ref}之和",
                "avg": "{ref}的平均值", "min": "{ref}的最小值", "max": "{ref}的最大值"},
    having="{what}{is_}{value}",
    orders=("从大到小", "从小到大", "从晚到早", "从早到晚"),
    decimals="结果保留 {decimals} 位小数。",
    intro="请根据下列表格回答最后的问题。空单元格不计入。\n\n",
    answer="请在以 \"Answer:\" 开头的一行中以 JSON 列表给出答案，字符串加引号。",
)

LANGUAGES: dict[str, Language] = {"en": ENGLISH, "zh": CHINESE}
NO_CONDITION = {"en": "", "zh": "的所有行"}


def words(query: Query, database: Database, language: str) -> str:
    """The question, with how it is to be answered."""
    writer = _Writer(LANGUAGES[language], database, query)
    text = " ".join([*map(writer.join, query.joins), writer.sentence(NO_CONDITION[language])])
    return text + writer.rounding() + writer.language.answer


@dataclass(frozen=True)
class _Writer:
    language: Language
    database: Database
    query: Query

    def sentence(self, all_rows: str) -> str:
        query, language = self.query, self.language
        conditions = language.both.join(map(self.condition, query.where))
        parts = {
            "table": self.quoted(query.table), "limit": query.limit, "what": self.item(query.item),
            "where": language.where.format(conditions=conditions) if conditions else all_rows,
            "group": self.ref(query.group) if query.group else "", "by": self.item(query.order) if query.order else "",
            "most": language.orders[2 * self.by_date() + (not query.descending)],
            "having": self.having(query.having) if query.having else "",
        }
        return language.forms[self.form()].format(**parts)

    def form(self) -> str:
        query = self.query
        if query.group is not None:
            return "having" if query.having is not None else "group order"
        if query.order is not None:
            return "order"
        if query.item.ref is None:
            return "count"
        if query.item.aggregate:
            return "aggregate"
        return "different" if query.different else "look up" if self.by_key() else "list"

    def by_key(self) -> bool:
        """Whether one condition names one row."""
        if self.query.joins or [condition.op for condition in self.query.where] != ["="]:
            return False
        ref = self.query.where[0].ref
        return is_key(self.database.table(ref.table).values(ref.column))

    def rounding(self) -> str:
        return "" if self.query.decimals is None else self.language.decimals.format(decimals=self.query.decimals)

    def join(self, join: Join) -> str:
        return self.language.join.format(known_table=self.quoted(join.known.table), new_table=self.quoted(join.new.table),
                                         known=self.quoted(join.known.column), new=self.quoted(join.new.column))

    def condition(self, condition: Condition) -> str:
        return self.language.condition.format(ref=self.ref(condition.ref), is_=self.is_(condition.ref, condition.op),
                                              value=self.value(condition.value))

    def having(self, having: Having) -> str:
        is_ = self.language.comparisons[having.op]
        return self.language.having.format(what=self.item(having.item), is_=is_, value=self.value(having.value))

    def by_date(self) -> bool:
        order = self.query.order
        return order is not None and order.ref is not None and not order.aggregate and self.is_date(order.ref)

    def item(self, item: Item) -> str:
        if item.ref is None:
            return self.language.aggregates["count"]
        ref = self.ref(item.ref)
        if not item.aggregate:
            return ref
        name = ("different" if item.different else "filled") if item.aggregate == "count" else item.aggregate
        return self.language.aggregates[name].format(ref=ref)

    def is_(self, ref: Ref, op: str) -> str:
        return (self.language.dates if self.is_date(ref) else self.language.comparisons)[op]

    def is_date(self, ref: Ref) -> bool:
        table = self.database.table(ref.table)
        return table.columns[table.at(ref.column)].type == "date"

    def value(self, value: Value) -> str:
        return f'"{value}"' if isinstance(value, str) else written(value)

    def ref(self, ref: Ref) -> str:
        return self.quoted(f"{ref.table}.{ref.column}" if self.query.joins else ref.column)

    def quoted(self, name: str) -> str:
        return name.join(self.language.quote)
