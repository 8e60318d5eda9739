"""Schemas of our own: thirty tables of ten fields, three to a field, each linked to the one before it.

Names and words are in English and Chinese ("en/zh"); values are drawn. There are no people in them. One cell in thirty or so is
empty, keys aside.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from longspan.evaluation.tables.pool import Column, Link, Table, Value

LANGUAGES = ("en", "zh")
EMPTY = 0.03
"""Share of cells that are empty, keys aside."""
ABSENT = 12
"""Keys that a foreign key is drawn from when its table isn't there."""
Draw = Callable[[Random, int], Value]
"""A cell's value, in the language of this index."""


@dataclass(frozen=True)
class Field:
    """A column of a schema: its names, its type, how a cell is drawn; `prefix` marks a key, `parent` a foreign key."""

    names: tuple[str, ...]
    type: str
    draw: Draw | None = None
    prefix: str = ""
    parent: str = ""


@dataclass(frozen=True)
class Schema:
    """A table that can be drawn."""

    names: tuple[str, ...]
    fields: tuple[Field, ...]

    @property
    def prefix(self) -> str:
        """Of the codes in its key."""
        return self.fields[0].prefix


def both(text: str) -> tuple[str, ...]:
    """The two languages of "en/zh"."""
    return tuple(text.split("/"))


def key(names: str, prefix: str) -> Field:
    """A code that no other row has."""
    return Field(both(names), "text", prefix=prefix)


def refers(names: str, parent: str) -> Field:
    """The key of a row of another table."""
    return Field(both(names), "text", parent=parent)


def integer(names: str, low: int, high: int) -> Field:
    return Field(both(names), "integer", lambda rng, _: rng.randint(low, high))


def real(names: str, low: float, high: float, digits: int = 1) -> Field:
    return Field(both(names), "real", lambda rng, _: round(rng.uniform(low, high), digits))


def date(names: str, first: int, last: int) -> Field:
    """Any day of these years."""
    start, end = datetime.date(first, 1, 1).toordinal(), datetime.date(last, 12, 31).toordinal()
    return Field(both(names), "date", lambda rng, _: datetime.date.fromordinal(rng.randint(start, end)).isoformat())


def text(names: str, words: str) -> Field:
    """One of some words."""
    found = [both(word) for word in words.split()]
    return Field(both(names), "text", lambda rng, language: rng.choice(found)[language])


TOWNS = ("Northgate/北门 Millbrook/磨溪 Ashford/灰津 Redcliff/赤崖 Stonebridge/石桥 Elmwood/榆林 Fairhaven/和港 Oakdale/橡谷 "
         "Riverton/河镇 Westport/西港 Greenfield/青田 Lakeside/湖滨")
REGIONS = "coast/海岸 valley/山谷 plateau/高原 delta/三角洲 forest/林区 steppe/草原 marsh/沼泽 ridge/山脊"
MAKERS = "Arcon/安康 Belmar/贝尔玛 Cordex/科德 Dynar/迪纳 Everon/永隆 Fortis/富特 Gravia/格拉维"
STATES = "ready/就绪 idle/空闲 repair/维修 retired/退役 testing/测试"
GRADES = "A/A B/B C/C D/D"

SCHEMAS = (
    Schema(both("depots/车场"), (
        key("depot_id/车场编号", "DP"), text("town/城镇", TOWNS), integer("bays/车位", 4, 90), real("area/面积", 200, 990),
        date("opened/启用日期", 1990, 2019))),
    Schema(both("vehicles/车辆"), (
        key("vehicle_id/车辆编号", "VH"), refers("depot_id/车场编号", "depots"), text("maker/厂家", MAKERS),
        integer("seats/座位", 8, 80), real("load/载重", 0.5, 24), date("bought/购入日期", 2010, 2024))),
    Schema(both("trips/行程"), (
        key("trip_id/行程编号", "TR"), refers("vehicle_id/车辆编号", "vehicles"), real("distance/里程", 5, 600),
        integer("stops/停靠次数", 0, 30), text("weather/天气", "sun/晴 rain/雨 fog/雾 snow/雪 wind/风"),
        date("day/日期", 2023, 2024))),

    Schema(both("stations/测站"), (
        key("station_id/测站编号", "ST"), text("region/地区", REGIONS), integer("altitude/海拔", 0, 3000),
        real("mast/塔高", 2, 40), date("built/建成日期", 1985, 2020))),
    Schema(both("sensors/传感器"), (
        key("sensor_id/传感器编号", "SN"), refers("station_id/测站编号", "stations"),
        text("quantity/物理量", "temperature/温度 humidity/湿度 pressure/气压 radiation/辐射 rainfall/雨量 windspeed/风速"),
        real("resolution/分辨率", 0.01, 2, 2), integer("range/量程", 10, 999), date("tested/检定日期", 2020, 2024))),
    Schema(both("readings/读数"), (
        key("reading_id/读数编号", "RD"), refers("sensor_id/传感器编号", "sensors"), real("value/数值", -40, 120, 2),
        integer("samples/样本数", 1, 600), text("flag/标记", "good/正常 suspect/可疑 missing/缺测 repaired/订正"),
        date("taken/采集日期", 2022, 2024))),

    Schema(both("warehouses/仓库"), (
        key("warehouse_id/仓库编号", "WH"), text("city/城市", TOWNS), integer("docks/月台", 1, 40),
        real("volume/容积", 100, 5000), text("climate/温控", "dry/干燥 cold/冷藏 frozen/冷冻 normal/常温"))),
    Schema(both("products/产品"), (
        key("product_id/产品编号", "PR"), refers("warehouse_id/仓库编号", "warehouses"),
        text("material/材料", "steel/钢 copper/铜 glass/玻璃 timber/木材 rubber/橡胶 paper/纸 cotton/棉"),
        real("weight/重量", 0.1, 90), integer("stock/库存", 0, 2000), date("listed/上架日期", 2015, 2024))),
    Schema(both("orders/订单"), (
        key("order_id/订单编号", "OR"), refers("product_id/产品编号", "products"), integer("pieces/件数", 1, 400),
        real("price/价格", 2, 900, 2), text("channel/渠道", "web/网络 shop/门店 phone/电话 agent/代理"),
        date("placed/下单日期", 2023, 2024))),

    Schema(both("lines/线路"), (
        key("line_id/线路编号", "LN"), text("colour/颜色", "red/红 blue/蓝 green/绿 amber/琥珀 violet/紫 grey/灰"),
        real("length/长度", 4, 300), integer("trains/列车数", 2, 70), date("started/开通日期", 1960, 2020))),
    Schema(both("halts/车站"), (
        key("halt_id/车站编号", "HL"), refers("line_id/线路编号", "lines"), text("town/城镇", TOWNS),
        integer("platforms/站台", 1, 14), integer("passengers/客流", 100, 9999), real("kilometre/里程桩", 0, 300))),
    Schema(both("delays/晚点"), (
        key("delay_id/晚点编号", "DL"), refers("halt_id/车站编号", "halts"), integer("minutes/分钟", 1, 180),
        text("cause/原因", "signal/信号 ice/冰冻 flood/洪水 power/停电 works/施工"), date("day/日期", 2023, 2024))),

    Schema(both("orchards/果园"), (
        key("orchard_id/果园编号", "OC"), text("region/地区", REGIONS), real("hectares/公顷", 1, 80),
        integer("wells/水井", 0, 12), date("planted/种植日期", 1980, 2015))),
    Schema(both("plots/地块"), (
        key("plot_id/地块编号", "PL"), refers("orchard_id/果园编号", "orchards"),
        text("fruit/水果", "apple/苹果 pear/梨 plum/李 cherry/樱桃 peach/桃 quince/榅桲"), integer("trees/树数", 20, 900),
        real("slope/坡度", 0, 30), text("soil/土壤", "clay/黏土 loam/壤土 sand/沙土 chalk/白垩"))),
    Schema(both("harvests/采收"), (
        key("harvest_id/采收编号", "HV"), refers("plot_id/地块编号", "plots"), integer("crates/箱数", 3, 700),
        real("sugar/糖度", 8, 20), text("grade/等级", GRADES), date("picked/采摘日期", 2020, 2024))),

    Schema(both("domes/圆顶"), (
        key("dome_id/圆顶编号", "DM"), text("region/地区", REGIONS), integer("elevation/高程", 500, 4500),
        real("diameter/直径", 4, 40), date("finished/竣工日期", 1970, 2020))),
    Schema(both("instruments/仪器"), (
        key("instrument_id/仪器编号", "IN"), refers("dome_id/圆顶编号", "domes"),
        text("band/波段", "optical/可见光 infrared/红外 ultraviolet/紫外 radio/射电"), real("aperture/口径", 0.2, 9),
        integer("pixels/像素", 256, 9000), text("state/状态", STATES))),
    Schema(both("exposures/曝光"), (
        key("exposure_id/曝光编号", "EX"), refers("instrument_id/仪器编号", "instruments"), real("seconds/秒数", 1, 1800),
        real("seeing/视宁度", 0.4, 3, 2), text("target/目标", "galaxy/星系 nebula/星云 comet/彗星 cluster/星团 planet/行星"),
        date("night/夜晚", 2021, 2024))),

    Schema(both("windfarms/风场"), (
        key("windfarm_id/风场编号", "WF"), text("region/地区", REGIONS), real("capacity/容量", 10, 400),
        integer("masts/测风塔", 1, 9), date("connected/并网日期", 1998, 2022))),
    Schema(both("turbines/风机"), (
        key("turbine_id/风机编号", "TB"), refers("windfarm_id/风场编号", "windfarms"), text("maker/厂家", MAKERS),
        real("rating/额定功率", 0.8, 15), integer("hub/轮毂高度", 50, 170), text("state/状态", STATES))),
    Schema(both("outages/停机"), (
        key("outage_id/停机编号", "OU"), refers("turbine_id/风机编号", "turbines"), real("hours/小时", 0.5, 200),
        text("part/部件", "gearbox/齿轮箱 blade/叶片 generator/发电机 cable/电缆 brake/制动器"),
        real("loss/损失", 0.1, 90), date("began/开始日期", 2021, 2024))),

    Schema(both("ports/港口"), (
        key("port_id/港口编号", "PT"), text("town/城镇", TOWNS), integer("cranes/起重机", 1, 40), real("depth/水深", 4, 20),
        date("dredged/疏浚日期", 2005, 2023))),
    Schema(both("berths/泊位"), (
        key("berth_id/泊位编号", "BR"), refers("port_id/港口编号", "ports"), real("metres/米数", 60, 420),
        text("cargo/货类", "grain/谷物 ore/矿石 oil/油品 timber/木材 containers/集装箱 cars/汽车"),
        integer("bollards/系船柱", 6, 60))),
    Schema(both("calls/靠泊"), (
        key("call_id/靠泊编号", "CL"), refers("berth_id/泊位编号", "berths"), integer("tonnes/吨数", 50, 90000),
        real("stay/停留", 2, 140), text("flag_colour/旗色", "red/红 blue/蓝 green/绿 white/白 yellow/黄"),
        date("arrived/到港日期", 2023, 2024))),

    Schema(both("reservoirs/水库"), (
        key("reservoir_id/水库编号", "RV"), text("region/地区", REGIONS), real("surface/水面", 0.3, 90),
        integer("storage/库容", 5, 4000), date("filled/蓄水日期", 1950, 2010))),
    Schema(both("gates/闸门"), (
        key("gate_id/闸门编号", "GT"), refers("reservoir_id/水库编号", "reservoirs"), real("width/宽度", 1, 20),
        text("drive/驱动", "electric/电动 hydraulic/液压 manual/手动"), integer("lifts/启闭次数", 0, 5000),
        date("checked/检查日期", 2019, 2024))),
    Schema(both("releases/放水"), (
        key("release_id/放水编号", "RL"), refers("gate_id/闸门编号", "gates"), real("flow/流量", 1, 800),
        integer("duration/时长", 5, 2000), text("reason/缘由", "irrigation/灌溉 flood/防洪 power/发电 flushing/冲沙"),
        date("day/日期", 2022, 2024))),

    Schema(both("workshops/车间"), (
        key("workshop_id/车间编号", "WS"), text("city/城市", TOWNS), real("floor/占地", 80, 4000),
        integer("shifts/班次", 1, 4), date("licensed/许可日期", 2000, 2022))),
    Schema(both("machines/机床"), (
        key("machine_id/机床编号", "MC"), refers("workshop_id/车间编号", "workshops"), text("maker/厂家", MAKERS),
        integer("spindles/主轴", 1, 12), real("power/功率", 1, 90), text("state/状态", STATES))),
    Schema(both("jobs/加工单"), (
        key("job_id/加工单编号", "JB"), refers("machine_id/机床编号", "machines"), integer("parts/零件数", 1, 900),
        real("scrap/废品率", 0, 12, 2), text("finish/表面", "rough/粗糙 fine/精细 polished/抛光 coated/镀层"),
        date("due/交期", 2023, 2025))),
)


@dataclass(frozen=True)
class Synthetic:
    """A schema as a source of tables in one language."""

    schema: Schema
    language: str = "en"

    @property
    def name(self) -> str:
        return self.schema.names[self._at]

    @property
    def identity(self) -> str:
        return f"{self.language}/{self.name}"

    @property
    def most(self) -> None:
        return None

    @property
    def links(self) -> tuple[Link, ...]:
        found = []
        for field in self.schema.fields:
            if field.parent:
                parent = BY_NAME[field.parent]
                found.append(Link(self.name, field.names[self._at], parent.names[self._at], parent.fields[0].names[self._at]))
        return tuple(found)

    def take(self, rows: int, rng: Random, parents: Mapping[str, Table]) -> Table:
        """Rows drawn anew."""
        columns = tuple(Column(field.names[self._at], field.type) for field in self.schema.fields)
        return Table(self.name, columns, tuple(zip(*(self._cells(field, rows, rng, parents) for field in self.schema.fields))))

    def _cells(self, field: Field, rows: int, rng: Random, parents: Mapping[str, Table]) -> list[Value]:
        if field.prefix:
            return list(codes(field.prefix, rows, rng))
        if field.parent:
            parent = BY_NAME[field.parent]
            table = parents.get(parent.names[self._at])
            held = codes(parent.prefix, ABSENT, rng) if table is None else table.values(parent.fields[0].names[self._at])
            return [rng.choice(held) for _ in range(rows)]
        draw, at = field.draw, self._at
        assert draw is not None
        return [None if rng.random() < EMPTY else draw(rng, at) for _ in range(rows)]

    @property
    def _at(self) -> int:
        return LANGUAGES.index(self.language)


def codes(prefix: str, n: int, rng: Random) -> list[str]:
    """Different codes such as DP-4821."""
    low = 1000
    while 2 * n > 9 * low:
        low *= 10
    return [f"{prefix}-{number}" for number in rng.sample(range(low, 10 * low), n)]


BY_NAME = {schema.names[0]: schema for schema in SCHEMAS}


def synthetic_sources(language: str) -> list[Synthetic]:
    """Every schema as a source."""
    return [Synthetic(schema, language) for schema in SCHEMAS]
